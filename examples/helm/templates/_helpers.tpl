{{- define "exeat.labels" -}}
app.kubernetes.io/name: exeat
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Selects the proxy of this release. */ -}}
{{- define "exeat.selector" -}}
app.kubernetes.io/name: exeat
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
