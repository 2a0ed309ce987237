{{- define "triptych.name" -}}
{{- if contains "triptych" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-triptych" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "triptych.selector" -}}
app.kubernetes.io/name: triptych
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "triptych.labels" -}}
{{ include "triptych.selector" . }}
{{ include "triptych.common" . }}
{{- end }}

{{/* Labels of what the Service and the policy of the serving pods do not select. */}}
{{- define "triptych.common" -}}
app.kubernetes.io/part-of: triptych
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "triptych.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-cuda" "" (gt (int .Values.gpu.count) 0))) }}
{{- end }}

{{- define "triptych.account" -}}
{{ .Values.serviceAccount.name | default (include "triptych.name" .) }}
{{- end }}

{{- define "triptych.claim" -}}
{{ .Values.volume.existingClaim | default (printf "%s-models" (include "triptych.name" .)) }}
{{- end }}

{{/* The models of the Hub, as a list of JSON. */}}
{{- define "triptych.hub" -}}
{{- $found := list }}
{{- range $name, $model := .Values.models }}
{{- $path := $model }}
{{- if kindIs "map" $model }}{{ $path = $model.path }}{{ end }}
{{- if hasPrefix "hf:" (toString $path) }}{{ $found = append $found $path }}{{ end }}
{{- end }}
{{- $found | uniq | toJson }}
{{- end }}

{{/* The file of `triptych serve --config`: what other values say, then `config`, which wins in either spelling of a name; null is no value. */}}
{{- define "triptych.config" -}}
{{- $made := dict "api_key_file" "/run/secrets/triptych/api_keys" "drain_timeout" .Values.drainSeconds "log_format" "json" }}
{{- if .Values.keys.admin }}{{ $_ := set $made "admin_key_file" "/run/secrets/triptych/admin_keys" }}{{ end }}
{{- if gt (int .Values.gpu.count) 0 }}{{ $_ := set $made "device" "cuda" }}{{ end }}
{{- if gt (int .Values.gpu.count) 1 }}{{ $_ := set $made "tensor_parallel_size" .Values.gpu.count }}{{ end }}
{{- if .Values.gateway.inferencePool.picker }}{{ $_ := set $made "metrics" "vllm" }}{{ end }}
{{- if .Values.models }}{{ $_ := set $made "models" .Values.models }}{{ end }}
{{- with .Values.volume }}
{{- if and .enabled .modelsDir.enabled }}
{{- $_ := set $made "models_dir" "/models" }}
{{- $_ := set $made "model_memory" .modelsDir.memory }}
{{- $_ := set $made "keep_alive" .modelsDir.keepAliveSeconds }}
{{- $_ := set $made "weights_cache" "/weights/cache" }}
{{- $_ := set $made "weights_cache_size" .modelsDir.weightsCacheSize }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.config }}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $made (replace "-" "_" $name) $value }}{{ end }}
{{- end }}
{{- toYaml $made }}
{{- end }}

{{/* The port for monitoring, where `config` names one; else empty. */}}
{{- define "triptych.metricsPort" -}}
{{- $config := include "triptych.config" . | fromYaml }}
{{- with $config.metrics_port }}{{ int . }}{{ end }}
{{- end }}

{{- define "triptych.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "triptych.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
