{{/* What the pods of server and clients have alike. */}}
{{- define "raafl.labels" -}}
app.kubernetes.io/name: raafl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "raafl.pod" -}}
restartPolicy: Never
automountServiceAccountToken: false
terminationGracePeriodSeconds: 300
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "raafl.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A pod that ended with 130 was stopped by Kubernetes, which is no failure; bad input (2) no retry mends. */}}
{{- define "raafl.failures" -}}
- action: Ignore
  onExitCodes: {containerName: raafl, operator: In, values: [130]}
- action: Ignore
  onPodConditions: [{type: DisruptionTarget, status: "True"}]
{{- end }}
