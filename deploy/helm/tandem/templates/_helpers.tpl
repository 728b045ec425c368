{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "tandem.keySecret" -}}
{{ default (printf "%s-cluster" .Release.Name) .Values.clusterSecret.existingSecret }}
{{- end }}

{{- /* What every pod of Tandem's has. */ -}}
{{- define "tandem.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 60 }}
{{- include "tandem.podSecurity" . | nindent 0 }}
{{- end }}

{{- define "tandem.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- if .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml .Values.imagePullSecrets | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The options that name the pools which `tandem scale` sizes; empty where it doesn't. */ -}}
{{- define "tandem.scaled" -}}
{{- if eq .Values.autoscaling.by "tandem" }}
{{- range $name, $pool := .Values.pools }}
{{- if $pool.autoscaling.enabled }}
- --pool={{ $pool.role }}={{ $.Release.Name }}-{{ $name }}:{{ $pool.autoscaling.min }}:{{ $pool.autoscaling.max }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.volumes" -}}
- name: cluster-key
  secret: {secretName: {{ include "tandem.keySecret" . }}, defaultMode: 288}
- name: scratch
  emptyDir: {}
{{- if .Values.modelVolume }}
- name: models
  {{- toYaml .Values.modelVolume | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
- {name: cluster-key, mountPath: /etc/tandem/cluster, readOnly: true}
- {name: scratch, mountPath: /tmp}
- {name: scratch, mountPath: /home/tandem}
{{- if .Values.modelVolume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "tandem.env" -}}
- {name: TANDEM_CLUSTER_SECRET_FILE, value: /etc/tandem/cluster/cluster.key}
- {name: TANDEM_LOG_FORMAT, value: {{ .Values.logFormat }}}
- {name: TANDEM_DRAIN_S, value: {{ .Values.drainSeconds | quote }}}
- {name: HOME, value: /home/tandem}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .Values.redis.enabled }}
- {name: TANDEM_REDIS_URL, value: {{ printf "redis://%s-redis:6379" .Release.Name | quote }}}
{{- else }}
- name: TANDEM_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ required "redis.urlSecret names the Secret with Redis' URL, unless redis.enabled" .Values.redis.urlSecret }}, key: url}}
{{- end }}
{{- if .Values.huggingFaceTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.huggingFaceTokenSecret }}, key: token}}
{{- end }}
{{- end }}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
