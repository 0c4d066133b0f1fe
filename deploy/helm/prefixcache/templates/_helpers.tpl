{{- define "prefixcache.name" -}}
{{- if contains "prefixcache" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-prefixcache{{ end }}
{{- end }}

{{- define "prefixcache.selector" -}}
app.kubernetes.io/name: prefixcache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prefixcache.labels" -}}
{{ include "prefixcache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "prefixcache.gatewaySelector" -}}
app.kubernetes.io/name: prefixcache-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "prefixcache.gatewayLabels" -}}
{{ include "prefixcache.gatewaySelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "prefixcache.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* A setting as text: whole numbers arrive as floating-point ones and must not be written as 1e+06. */}}
{{- define "prefixcache.setting" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}
