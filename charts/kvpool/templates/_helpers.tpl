{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* Name of namespaced objects. Release names are unique within a namespace, so these are, too. */ -}}
{{- define "kvpool.name" -}}
{{ .Release.Name }}-operator
{{- end -}}

{{- /* Name of objects outside the release's namespace; RBAC allows the colons that keep it unambiguous. */ -}}
{{- define "kvpool.clusterName" -}}
kvpool:{{ .Release.Namespace }}:{{ .Release.Name }}
{{- end -}}

{{- define "kvpool.selectorLabels" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvpool.labels" -}}
{{ include "kvpool.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* The user's labels and ours, which win: selectors need them. Call with (list $ .Values.podLabels). */ -}}
{{- define "kvpool.labelsOver" -}}
{{- $own := include "kvpool.labels" (index . 0) | fromYaml -}}
{{- mergeOverwrite (deepCopy (index . 1)) $own | toYaml -}}
{{- end -}}

{{- /* Reference of one image; call with (list $ .Values.image.operator). */ -}}
{{- define "kvpool.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end -}}
{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- define "kvpool.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kvpool.name" .) }}
{{- end -}}

{{- /* Namespaces have no dots, so this is unambiguous; the kind allows no colons. */ -}}
{{- define "kvpool.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
{{ .Values.priorityClass.name | default (printf "%s.%s" .Release.Namespace .Release.Name) }}
{{- else -}}
{{ .Values.priorityClass.name }}
{{- end -}}
{{- end -}}

{{- /* What every container of ours runs with: the Restricted level, and a root file system that nobody writes. */ -}}
{{- define "kvpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvpool.subjects" -}}
- kind: ServiceAccount
  name: {{ include "kvpool.serviceAccount" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end -}}
