{{/*
The pods of a Ray cluster, and the reader pod beside it; the only copy. The platform's ConfigMap and
the standing RayCluster include "trainyard.shape"; a run's RayJob gets it from the platform.

All pods satisfy Pod Security "restricted". Security settings and mounts stand on the Ray container
because the operator copies them from there to the init container that it injects.
*/}}

{{/* spec of a RayCluster. Arguments: chart, groups: a list of {pool, replicas}, and isRun: whether a run has it. */}}
{{- define "trainyard.shape" -}}
{{- $chart := .chart -}}
{{- $head := $chart.Values.head -}}
rayVersion: {{ $chart.Values.rayVersion | quote }}
authOptions:
  mode: {{ ternary "token" "disabled" $chart.Values.security.tokenAuthentication }}
headGroupSpec:
  rayStartParams:
    {{- /* No logical CPU: the head drives, and nothing is scheduled on it. */}}
    num-cpus: "0"
  template:
    metadata:
      labels:
        {{- include "trainyard.podLabels" $chart | nindent 8 }}
    spec:
      {{- include "trainyard.shape.pod" (dict "chart" $chart "place" $head "isRun" .isRun) | nindent 6 }}
      {{- /* The hook below, and then what the head takes to end. */}}
      terminationGracePeriodSeconds: 60
      containers:
        - name: ray-head
          {{- include "trainyard.shape.container" $chart | nindent 10 }}
          lifecycle:
            preStop:
              exec:
                {{- /* Drivers that hold a run have their workers save, and give it back; see trainyard_trainer.on_ray.leaving. */}}
                command: [sh, -c, touch "$TRAINYARD_LEAVING"; flock --timeout 45 "$TRAINYARD_LEAVING" true]
          ports:
            {{- /* Where ports are declared, the operator finds the dashboard by this name. */}}
            - {name: dashboard, containerPort: 8265}
            - {name: gcs-server, containerPort: 6379}
            - {name: metrics, containerPort: 8080}
          resources:
            {{- include "trainyard.shape.resources" $head | nindent 12 }}
          env:
            {{- include "trainyard.shape.rayEnv" $chart | nindent 12 }}
            {{- /* No drain: after the hook nothing is left to wait for, and a head would take the whole time-out. */}}
            - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
            {{- /* A lost node is given up after five checks that fail. If it is just silent, that takes 30 s: Ray's
            own checks come 3 s after each other, fail after 10 s, and take 65. */}}
            - {name: RAY_health_check_period_ms, value: "1000"}
            - {name: RAY_health_check_timeout_ms, value: "5000"}
            {{- /* A stopped driver gets this long to have its workers save; Ray's own is 3 s. */}}
            - {name: RAY_JOB_STOP_WAIT_TIME_S, value: "40"}
            {{- /* The driver's lines also go to the container's output, for kubectl logs and log collectors. */}}
            - {name: TRAINYARD_LOG, value: /proc/1/fd/1}
            - {name: TRAINYARD_LEAVING, value: /tmp/leaving}
workerGroupSpecs:
  {{- range .groups }}
  {{- $pool := get $chart.Values.pools .pool }}
  - groupName: {{ .pool | quote }}
    replicas: {{ int .replicas }}
    minReplicas: {{ int .replicas }}
    maxReplicas: {{ int .replicas }}
    rayStartParams: {}
    template:
      metadata:
        labels:
          {{- include "trainyard.podLabels" $chart | nindent 10 }}
      spec:
        {{- include "trainyard.shape.pod" (dict "chart" $chart "place" $pool "isRun" $.isRun) | nindent 8 }}
        {{- /* Longer than the drain below, in which workers save a checkpoint. */}}
        terminationGracePeriodSeconds: 90
        containers:
          - name: ray-worker
            {{- include "trainyard.shape.container" $chart | nindent 12 }}
            resources:
              {{- include "trainyard.shape.resources" (include "trainyard.shape.pool" $pool | fromYaml) | nindent 14 }}
            env:
              {{- include "trainyard.shape.rayEnv" $chart | nindent 14 }}
              - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "60"}
              {{- /* The next epoch's data tasks find their processes still there: a new one imports for
              seconds. Ray's own is 1 s. */}}
              - {name: RAY_idle_worker_killing_time_threshold_ms, value: "600000"}
  {{- end }}
{{- end }}

{{/*
Ray's autoscaler, which the operator puts beside the head of an elastic run: no other container gets the
token. Its rights are the operator's doing: a Role to read pods and to patch its own RayCluster.
*/}}
{{- define "trainyard.shape.autoscaler" -}}
options:
  version: v2
  imagePullPolicy: {{ .Values.imagePullPolicy }}
  securityContext:
    {{- include "trainyard.shape.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 512Mi}
    limits: {cpu: 500m, memory: 512Mi}
  env:
    - {name: HOME, value: /home/trainyard}
    - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/trainyard}
    - {name: autoscaler-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
volumes:
  - name: autoscaler-token
    projected:
      sources:
        - serviceAccountToken: {path: token}
        - configMap:
            name: kube-root-ca.crt
            items: [{key: ca.crt, path: ca.crt}]
        - downwardAPI:
            items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end }}

{{/* A pod that lasts for one command over the storage; the launcher adds name, image and command. */}}
{{- define "trainyard.shape.reader" -}}
apiVersion: v1
kind: Pod
metadata:
  labels:
    {{- include "trainyard.podLabels" . | nindent 4 }}
spec:
  {{- include "trainyard.shape.pod" (dict "chart" . "place" .Values.head) | nindent 2 }}
  restartPolicy: Never
  activeDeadlineSeconds: 120
  containers:
    - name: reader
      {{- include "trainyard.shape.container" . | nindent 6 }}
      resources:
        requests: {cpu: 100m, memory: 256Mi}
        limits: {cpu: "1", memory: 1Gi}
      env:
        {{- include "trainyard.shape.env" . | nindent 8 }}
{{- end }}

{{/* A pool's numbers, with what may be left out filled in. */}}
{{- define "trainyard.shape.pool" -}}
gpusPerNode: {{ int .gpusPerNode }}
{{- if .gpusPerNode }}
gpuResource: {{ .gpuResource | default "nvidia.com/gpu" | quote }}
{{- else }}
workersPerNode: {{ int .workersPerNode }}
{{- end }}
cpus: {{ .cpus }}
cpuRequest: {{ .cpuRequest | default .cpus }}
memoryGib: {{ int .memoryGib }}
{{- with .ephemeralStorageGib }}
ephemeralStorageGib: {{ int . }}
{{- end }}
{{- with .network }}
network:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Resources of a container that is given the numbers of a pool, or of the head. */}}
{{- define "trainyard.shape.resources" -}}
requests:
  cpu: {{ toString .cpuRequest | quote }}
  memory: {{ int .memoryGib }}Gi
  {{- with .ephemeralStorageGib }}
  ephemeral-storage: {{ int . }}Gi
  {{- end }}
  {{- if .gpusPerNode }}
  {{ .gpuResource }}: {{ toString .gpusPerNode | quote }}
  {{- end }}
limits:
  cpu: {{ toString .cpus | quote }}
  memory: {{ int .memoryGib }}Gi
  {{- with .ephemeralStorageGib }}
  ephemeral-storage: {{ int . }}Gi
  {{- end }}
  {{- if .gpusPerNode }}
  {{ .gpuResource }}: {{ toString .gpusPerNode | quote }}
  {{- end }}
{{- end }}

{{/* What all pods of runs share. Arguments: those of the next one. */}}
{{- define "trainyard.shape.pod" -}}
{{ include "trainyard.shape.identity" . }}
volumes:
  - {name: tmp, emptyDir: {}}
  - {name: home, emptyDir: {}}
  {{- if .chart.Values.storage.claim }}
  - name: storage
    persistentVolumeClaim:
      claimName: {{ include "trainyard.names.claim" .chart | quote }}
  {{- end }}
{{- end }}

{{/* Who a pod is and where it may lie. Arguments: chart, place: nodeSelector and tolerations, and isRun: whether it
trains for a run. */}}
{{- define "trainyard.shape.identity" -}}
{{- $values := .chart.Values -}}
serviceAccountName: {{ include "trainyard.names.serviceAccount" .chart | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  {{- /* Otherwise every start of a pod walks through all files of the storage. */}}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .isRun $values.job.separateAttempts }}
{{- /* Each attempt has a RayCluster of its own. A lost node looks ready for a while, and keeps the pods of the one before. */}}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {ray.io/is-ray-node: "yes"}
        matchLabelKeys: [trainyard.io/run]
        mismatchLabelKeys: [ray.io/cluster]
{{- end }}
{{- end }}

{{/* What all containers share. */}}
{{- define "trainyard.shape.container" -}}
image: {{ .Values.image | quote }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
securityContext:
  {{- include "trainyard.shape.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: home, mountPath: /home/trainyard}
  {{- with .Values.storage.claim }}
  - {name: storage, mountPath: {{ .mountPath | quote }}}
  {{- end }}
{{- end }}

{{- define "trainyard.shape.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "trainyard.shape.rayEnv" -}}
{{ include "trainyard.shape.env" . }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end }}

{{/* A writable home, and the way to the storage. */}}
{{- define "trainyard.shape.env" -}}
- {name: HOME, value: /home/trainyard}
{{- if not .Values.storage.claim }}
{{- with .Values.storage.s3 }}
- {name: AWS_REGION, value: {{ .region | quote }}}
{{- if .endpoint }}
{{- /* Other servers than AWS's refuse requests that ask for its newer checksums. */}}
- {name: AWS_RESPONSE_CHECKSUM_VALIDATION, value: when_required}
{{- end }}
{{- with .secretName }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ . | quote }}, key: AWS_ACCESS_KEY_ID}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef: {name: {{ . | quote }}, key: AWS_SECRET_ACCESS_KEY}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
