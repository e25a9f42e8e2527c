{{- define "relayd.selector" -}}
app.kubernetes.io/name: relayd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "relayd.labels" -}}
{{ include "relayd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "relayd.databaseSecret" -}}
{{- if .Values.database.existingSecret -}}
{{ .Values.database.existingSecret }}
{{- else if .Values.database.url -}}
{{ .Release.Name }}-database
{{- else -}}
{{ fail "database.existingSecret or database.url: the relays share one PostgreSQL, and need its URL" }}
{{- end -}}
{{- end }}
