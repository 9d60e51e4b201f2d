{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* What the operator does where pools and engines are. tests/chart holds them equal to what its code uses. */ -}}
{{- define "kvpool.poolRules" -}}
- apiGroups: [kvpool.dev]
  resources: [kvcachepools]
  verbs: [get, list, watch]
- apiGroups: [kvpool.dev]
  resources: [kvcachepools/status]
  verbs: [patch]
- apiGroups: [kvpool.dev]
  resources: [kvcachepools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [daemonsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [list, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [list, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [list]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [pods/eviction] # only of pools with clients.rewireUnwired
  verbs: [create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [list, create]
{{- end -}}

{{- /* What it reads of kinds that have no namespace, in both modes. */ -}}
{{- define "kvpool.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list]
- apiGroups: [node.k8s.io]
  resources: [runtimeclasses]
  verbs: [list]
{{- end -}}

{{- /* Its Lease. Creating cannot be limited to a name. */ -}}
{{- define "kvpool.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "kvpool.name" . }}]
  verbs: [get, update]
{{- end -}}
