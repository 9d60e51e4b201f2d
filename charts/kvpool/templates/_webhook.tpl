{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- define "kvpool.webhookName" -}}
{{ .Release.Name }}-webhook
{{- end -}}

{{- /* Namespaces have no dots, so this is unambiguous; the kind allows no colons. */ -}}
{{- define "kvpool.webhookConfiguration" -}}
{{ .Release.Namespace }}.{{ include "kvpool.webhookName" . }}
{{- end -}}

{{- define "kvpool.webhookSelectorLabels" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/component: webhook
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvpool.webhookLabels" -}}
{{- $own := include "kvpool.webhookSelectorLabels" . | fromYaml -}}
{{- mergeOverwrite (include "kvpool.labels" . | fromYaml) $own | toYaml -}}
{{- end -}}

{{- define "kvpool.webhookSubjects" -}}
- kind: ServiceAccount
  name: {{ include "kvpool.webhookName" . }}
  namespace: {{ .Release.Namespace | quote }}
{{- end -}}

{{- /* What the admission server does where pools are, and outside of any namespace. */ -}}
{{- define "kvpool.webhookPoolRules" -}}
- apiGroups: [kvpool.dev]
  resources: [kvcachepools]
  verbs: [list, watch]
{{- end -}}

{{- define "kvpool.webhookClusterRules" -}}
- apiGroups: [admissionregistration.k8s.io]
  resources: [mutatingwebhookconfigurations]
  resourceNames: [{{ include "kvpool.webhookConfiguration" . }}]
  verbs: [get{{ if not .Values.webhook.certManager.enabled }}, patch{{ end }}]
{{- end -}}

{{- /* Its certificates. Creating cannot be limited to a name. */ -}}
{{- define "kvpool.webhookSecretRules" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "kvpool.webhookName" . }}]
  verbs: [get, update]
{{- end -}}

{{- /*
One hook. Call with (dict "root" $ "name" ... "path" ... "required" bool "folders" bool): required pods are rather
refused than left unwired; folders: for namespaces that let pods mount folders of the node.
*/ -}}
{{- define "kvpool.hook" -}}
{{- $values := .root.Values -}}
- name: {{ .name }}
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: {{ ternary "Fail" "Ignore" .required }}
  reinvocationPolicy: IfNeeded # other webhooks may still change what was looked at
  matchPolicy: Equivalent
  timeoutSeconds: {{ $values.webhook.timeoutSeconds }}
  clientConfig:
    service:
      name: {{ include "kvpool.webhookName" .root }}
      namespace: {{ .root.Release.Namespace | quote }}
      port: 443
      path: {{ .path }}
  rules:
    - apiGroups: [""]
      apiVersions: [v1]
      resources: [pods]
      operations: [CREATE]
      scope: Namespaced
  objectSelector:
    matchExpressions:
      - key: kvpool.dev/pool
        operator: Exists
      - key: kvpool.dev/role
        operator: NotIn
        values: [server]
      - key: kvpool.dev/wiring
        operator: {{ ternary "In" "NotIn" .required }}
        values: [required]
  namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: NotIn
        values: {{- concat (list "kube-node-lease" "kube-public" "kube-system" .root.Release.Namespace) $values.webhook.excludedNamespaces | uniq | toYaml | nindent 10 }}
      {{- with $values.watchNamespaces }}
      - key: kubernetes.io/metadata.name
        operator: In
        values: {{- toYaml . | nindent 10 }}
      {{- end }}
      - key: pod-security.kubernetes.io/enforce
        operator: {{ ternary "NotIn" "In" .folders }}
        values: [baseline, restricted]
  matchConditions:
    - name: no-mirror-of-a-static-pod
      expression: "!has(object.metadata.annotations) || !('kubernetes.io/config.mirror' in object.metadata.annotations)"
    - name: not-windows
      expression: "!has(object.spec.os) || object.spec.os.name != 'windows'"
{{- end -}}
