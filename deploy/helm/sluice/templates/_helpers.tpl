{{- define "sluice.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "sluice.fullname" -}}
{{- $name := include "sluice.name" . }}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $both .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: {{ include "sluice.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sluice.gateway" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "sluice.controller" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "sluice.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "sluice.account" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "sluice.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "sluice.controllerAccount" -}}
{{- with .Values.controller.serviceAccount }}
{{- if .create }}
{{- default (printf "%s-controller" (include "sluice.fullname" $)) .name }}
{{- else }}
{{- default "default" .name }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of the TokenPools, TokenEntitlements, their Secrets and engines. */}}
{{- define "sluice.controllerNamespace" -}}
{{- default .Release.Namespace .Values.controller.namespace }}
{{- end }}

{{/* Most pods that may run at once. */}}
{{- define "sluice.mostReplicas" -}}
{{- with .Values.autoscaling }}{{ ternary .maxReplicas $.Values.replicas .enabled }}{{ end }}
{{- end }}

{{/* "true" if a pod must be gone before the next one starts: both would write one SQLite file and
spend each limit twice, or the next one could not mount a ReadWriteOnce volume. */}}
{{- define "sluice.alone" -}}
{{- $redis := or .Values.redis.enabled .Values.redis.url .Values.redis.urlSecret.name }}
{{- $sqlite := regexMatch "^([$][{][A-Za-z0-9_]+:-)?sqlite:" (toString .Values.config.state.url) }}
{{- $claim := and .Values.data.existingClaim (eq (int (include "sluice.mostReplicas" .)) 1) }}
{{- if or (and $sqlite (not $redis)) $claim }}true{{ end }}
{{- end }}

{{/* Seconds that a pod has to end. */}}
{{- define "sluice.grace" -}}
{{- $needed := add (int .Values.preStopSleepSeconds) (int (ceil (float64 .Values.config.server.drain_timeout_s))) }}
{{- default (add $needed 10) .Values.terminationGracePeriodSeconds }}
{{- end }}

{{/* What only a restart changes: pods roll when it does, everything else is reloaded in place. */}}
{{- define "sluice.restartDigest" -}}
{{- $models := list }}
{{- range .Values.config.models }}
{{- $pools := dict }}
{{- range $name, $pool := .pools }}
{{- $pool = omit $pool "workers" "max_model_len" "max_num_seqs" "tokens_per_second" "kv_cache_gib" "replicas" "transfer" }}
{{- range $phase := list "prefill" "decode" }}{{- with get $pool $phase }}
{{- $pool = set $pool $phase (omit . "workers" "max_num_seqs" "tokens_per_second" "kv_cache_gib" "replicas") }}
{{- end }}{{- end }}
{{- $_ := set $pools $name $pool }}
{{- end }}
{{- $kept := omit . "default_max_tokens" "spill_queue" "cache_salt" "engine_priority" "timeouts" "admission" }}
{{- $models = append $models (merge (dict "pools" $pools) (omit $kept "pools")) }}
{{- end }}
{{- $reloaded := list "models" "aliases" "entitlements" "tenants" "auth" "health" "timeouts" "retry" }}
{{- $config := omit .Values.config "server" }}
{{- range $reloaded }}{{- $config = omit $config . }}{{- end }}
{{- $server := omit .Values.config.server "admin_key" "viewer_key" "admin_keys" }}
{{- $parts := list $config $server $models }}
{{- if .Values.controller.enabled }}{{ $parts = append $parts "state.controller" }}{{ end }}
{{- toJson $parts | sha256sum }}
{{- end }}

{{/* Kind of discovery in `config` -> its namespaces ("": the release's), as JSON. */}}
{{- define "sluice.discovery" -}}
{{- $found := dict }}
{{- $text := toYaml .Values.config }}
{{- range regexFindAll "k8s://service/[a-z0-9.-]+" $text -1 }}
{{- $_ := set $found (printf "service %s" (regexReplaceAll "^k8s://service/[a-z0-9-]+\\.?" . "")) true }}
{{- end }}
{{- range regexFindAll "inferencepool://[a-z0-9.-]+" $text -1 }}
{{- $_ := set $found (printf "inferencepool %s" (regexReplaceAll "^inferencepool://[a-z0-9-]+\\.?" . "")) true }}
{{- end }}
{{- range regexFindAll "k8s://pods[^\\s\"']*" $text -1 }}
{{- $named := regexFind "[?&]namespace=[a-z0-9-]+" . }}
{{- $_ := set $found (printf "pods %s" (regexReplaceAll "^[?&]namespace=" $named "")) true }}
{{- end }}
{{- range .Values.rbac.namespaces }}
{{- $namespace := . }}
{{- range list "service" "pods" "inferencepool" }}
{{- $_ := set $found (printf "%s %s" . $namespace) true }}
{{- end }}
{{- end }}
{{- $spaces := dict }}
{{- range $each := keys $found | sortAlpha }}
{{- $kind := index (splitList " " $each) 0 }}
{{- $space := default $.Release.Namespace (index (splitList " " $each) 1) }}
{{- $_ := set $spaces $space (append (default list (index $spaces $space)) $kind | uniq | sortAlpha) }}
{{- end }}
{{- toJson $spaces }}
{{- end }}

{{/* Fits the "restricted" pod security standard. */}}
{{- define "sluice.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "sluice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}
