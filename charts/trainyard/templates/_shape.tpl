{{/*
The shape: the pod templates of a Ray cluster, and the reader pod. They exist only here. The platform's ConfigMap and the
standing RayCluster include "trainyard.shape". The launcher copies it from the platform into each RayJob.

All pods satisfy Pod Security "restricted", unless values of `pod` change that. Security settings and volume mounts are set on the Ray container, because
the operator copies them from there to the init container that it adds.
*/}}

{{/*
The spec of a RayCluster. Arguments: chart; pools: the names of the pools, one worker group for each; isRun: whether
it is for runs. For runs the launcher sets images, resources and replicas, so the shape omits them.
*/}}
{{- define "trainyard.shape" -}}
{{- $chart := .chart -}}
{{- $isRun := .isRun -}}
{{- $head := $chart.Values.head -}}
rayVersion: {{ $chart.Values.rayVersion | quote }}
{{- if include "trainyard.shape.scalesDown" . }}
enableInTreeAutoscaling: true
autoscalerOptions:
  idleTimeoutSeconds: {{ mul 60 $chart.Values.rayCluster.idleMinutes }}
  {{- toYaml (include "trainyard.shape.autoscaler" $chart | fromYaml).options | nindent 2 }}
{{- end }}
authOptions:
  mode: {{ ternary "token" "disabled" $chart.Values.security.tokenAuthentication }}
headGroupSpec:
  rayStartParams:
    {{- /* Without logical CPUs, Ray schedules no tasks or actors on the head. Only the driver runs there. */}}
    num-cpus: "0"
  template:
    {{- include "trainyard.pods.apply" (dict "chart" $chart "nodes" $head "role" "ray" "pod" (include "trainyard.shape.head" .)) | nindent 4 }}
workerGroupSpecs:
  {{- range $name := .pools }}
  {{- $pool := get $chart.Values.pools $name }}
  - groupName: {{ $name | quote }}
    {{- if not $isRun }}
    {{- range list "replicas" "maxReplicas" }}
    {{ . }}: {{ int $chart.Values.rayCluster.replicas }}
    {{- end }}
    minReplicas: {{ ternary 0 (int $chart.Values.rayCluster.replicas) (not (empty (include "trainyard.shape.scalesDown" $))) }}
    {{- if not $pool.gpusPerNode }}
    {{- /* The places of workers: CPUs alone would allow one more, for which there is no memory. */}}
    resources: {trainyard_worker: {{ int $pool.workersPerNode | toString | quote }}}
    {{- end }}
    {{- end }}
    rayStartParams: {}
    template:
      {{- include "trainyard.pods.apply" (dict "chart" $chart "nodes" $pool "role" "ray" "pod" (include "trainyard.shape.worker" (dict "chart" $chart "pool" $pool "isRun" $isRun))) | nindent 6 }}
  {{- end }}
{{- end }}

{{/* Not empty if the workers of the standing RayCluster are deleted while no run uses them. Arguments: chart, isRun. */}}
{{- define "trainyard.shape.scalesDown" -}}
{{- if and (not .isRun) .chart.Values.rayCluster.idleMinutes -}}
true
{{- end -}}
{{- end }}

{{/* The pod template of the head, before what the values set for pods. Arguments: chart, isRun. */}}
{{- define "trainyard.shape.head" -}}
metadata:
  labels:
    {{- include "trainyard.podLabels" .chart | nindent 4 }}
  {{- with include "trainyard.placement.headAnnotations" . | fromYaml }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "trainyard.shape.pod" (dict "chart" .chart "nodes" .chart.Values.head "isRun" .isRun) | nindent 2 }}
  {{- if include "trainyard.shape.scalesDown" . }}
    {{- toYaml (include "trainyard.shape.autoscaler" .chart | fromYaml).volumes | nindent 4 }}
  {{- end }}
  {{- /* The preStop hook below takes up to 45 s, and the head needs some seconds to terminate. */}}
  terminationGracePeriodSeconds: 60
  containers:
    - name: ray-head
      {{- include "trainyard.shape.container" .chart | nindent 6 }}
      {{- if not .isRun }}
        {{- range include "trainyard.data.part" (dict "chart" .chart "part" "mount") | fromYamlArray }}
        - {{ toJson . }}
        {{- end }}
      image: {{ .chart.Values.image | quote }}
      resources:
        {{- include "trainyard.sizes.resources" .chart.Values.head | nindent 8 }}
      {{- end }}
      {{- include "trainyard.shape.readiness" . | nindent 6 }}
      lifecycle:
        preStop:
          exec:
            {{- /* A driver that holds the lease of a run lets its workers save a checkpoint and releases the lease. See
            trainyard_trainer.on_ray.leaving. */}}
            command: [sh, -c, touch "$TRAINYARD_LEAVING"; flock --timeout 45 "$TRAINYARD_LEAVING" true]
      ports:
        {{- /* If any ports are declared, the operator finds the dashboard by this name. */}}
        - {name: dashboard, containerPort: {{ include "trainyard.ports.dashboard" .chart }}}
        - {name: gcs-server, containerPort: 6379}
        - {name: metrics, containerPort: {{ include "trainyard.ports.metrics" .chart }}}
      env:
        {{- include "trainyard.shape.rayEnv" .chart | nindent 8 }}
        {{- /* The head needs no drain: after the hook no work is left, and a drain would last for its whole timeout. */}}
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
        {{- /* Ray declares a node dead after failed health checks in a row. With these values that takes 9 s for a
        node that stops responding. With Ray's defaults (5 checks, 3 s between them, timeout 10 s) it takes 65 s. */}}
        - {name: RAY_health_check_period_ms, value: "1000"}
        - {name: RAY_health_check_timeout_ms, value: "2000"}
        - {name: RAY_health_check_failure_threshold, value: "3"}
        {{- /* Time that a stopped driver has to let its workers save a checkpoint. Ray's default is 3 s. */}}
        - {name: RAY_JOB_STOP_WAIT_TIME_S, value: "40"}
        {{- /* The driver also writes its log to the container's output, for `kubectl logs` and log collectors. */}}
        - {name: TRAINYARD_LOG, value: /proc/1/fd/1}
        - {name: TRAINYARD_LEAVING, value: /tmp/leaving}
        {{- if not .isRun }}
        {{- if .chart.Values.forkedWorkers }}
        - {name: TRAINYARD_LOCAL_RAY, value: forked}
        {{- end }}
        {{- with .chart.Values.notify.secret }}
        - name: TRAINYARD_NOTIFY_URL
          valueFrom:
            secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}, optional: true}
        {{- end }}
        {{- end }}
{{- end }}

{{/* The same of a pool's workers. Arguments: chart, pool, isRun. */}}
{{- define "trainyard.shape.worker" -}}
metadata:
  labels:
    {{- include "trainyard.podLabels" .chart | nindent 4 }}
  {{- with include "trainyard.placement.annotations" (dict "chart" .chart "nodes" .pool "isRun" .isRun) | fromYaml }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "trainyard.shape.pod" (dict "chart" .chart "nodes" .pool "isRun" .isRun "isWorkerOfRun" .isRun) | nindent 2 }}
  {{- /* Longer than the drain below, during which workers save a checkpoint. */}}
  terminationGracePeriodSeconds: 90
  containers:
    - name: ray-worker
      {{- include "trainyard.shape.container" .chart | nindent 6 }}
      {{- if not .isRun }}
        {{- range include "trainyard.data.part" (dict "chart" .chart "part" "mount") | fromYamlArray }}
        - {{ toJson . }}
        {{- end }}
      image: {{ .chart.Values.image | quote }}
      resources:
        {{- include "trainyard.sizes.resources" (include "trainyard.sizes.pool" .pool | fromYaml) | nindent 8 }}
      {{- end }}
      {{- include "trainyard.shape.readiness" . | nindent 6 }}
      env:
        {{- include "trainyard.shape.rayEnv" .chart | nindent 8 }}
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "60"}
        {{- /* Keep idle worker processes for the data tasks of the next epoch, because a new process needs seconds to
        import its modules. Ray's default is 1 s. */}}
        - {name: RAY_idle_worker_killing_time_threshold_ms, value: "600000"}
        {{- if and .chart.Values.forkedWorkers (not .isRun) (not .pool.gpusPerNode) }}
        - {name: TRAINYARD_LOCAL_RAY, value: forked}
        {{- end }}
{{- end }}

{{/*
When a pod of Ray is ready. A run starts once all of its pods are. The operator's own probe asks the same agent of Ray, but
first after 10 s and then each 5 s.
*/}}
{{- define "trainyard.shape.readiness" -}}
readinessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  initialDelaySeconds: 1
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 50
{{- end }}

{{/*
Ray's autoscaler, which the operator adds to the head pod of an elastic run, and of a standing RayCluster that gives nodes back. It is the only container with the token of the
service account. The operator grants it a Role to read pods and to patch its own RayCluster.
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
    {{- include "trainyard.shape.homeEnv" . | nindent 4 }}
    {{- include "trainyard.shape.usageStatsEnv" . | nindent 4 }}
  volumeMounts:
    {{- include "trainyard.shape.scratchMounts" . | nindent 4 }}
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

{{/*
A pod with the storage, in which the launcher runs commands on the folders of runs. The launcher sets name, image, command
and deadline. It is placed as heads are.
*/}}
{{- define "trainyard.shape.reader" -}}
{{- include "trainyard.pods.apply" (dict "chart" . "nodes" .Values.head "role" "storage" "pod" (include "trainyard.shape.readerPod" .)) -}}
{{- end }}

{{- define "trainyard.shape.readerPod" -}}
apiVersion: v1
kind: Pod
metadata:
  labels:
    {{- include "trainyard.podLabels" . | nindent 4 }}
spec:
  {{- include "trainyard.shape.pod" (dict "chart" . "nodes" .Values.head) | nindent 2 }}
  restartPolicy: Never
  containers:
    - name: reader
      {{- include "trainyard.shape.container" . | nindent 6 }}
      resources:
        requests: {cpu: 100m, memory: 256Mi}
        limits: {cpu: "1", memory: 1Gi}
      env:
        {{- include "trainyard.shape.env" . | nindent 8 }}
{{- end }}

{{/* The part of a pod's spec that all pods with the storage share. Arguments: as for "trainyard.shape.identity". */}}
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
  {{- /* The standing RayCluster. Runs mount what their run files name, and other pods have no data volumes. */}}
  {{- if and (hasKey . "isRun") (not .isRun) }}
  {{- range include "trainyard.data.part" (dict "chart" .chart "part" "volume") | fromYamlArray }}
  - {{ toJson . }}
  {{- end }}
  {{- end }}
{{- end }}

{{/*
Service account, security context and node selection of a pod. Arguments: chart; nodes: a pool or the head of the values;
isRun: whether the pod is a head or worker of a run; isWorkerOfRun.
*/}}
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
  {{- /* Otherwise each start of a pod changes the group of every file in the storage. */}}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- $placement := include "trainyard.placement.nodes" . | fromYaml }}
{{- with $placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "trainyard.placement.affinity" . | fromYaml }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The part of a container that all pods with the storage share, without its image. */}}
{{- define "trainyard.shape.container" -}}
imagePullPolicy: {{ .Values.imagePullPolicy }}
securityContext:
  {{- include "trainyard.shape.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "trainyard.shape.scratchMounts" . | nindent 2 }}
  {{- with .Values.storage.claim }}
  - {name: storage, mountPath: {{ .mountPath | quote }}}
  {{- end }}
{{- end }}

{{/* Mounts of the writable volumes: the root file system is read-only. */}}
{{- define "trainyard.shape.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: {{ include "trainyard.shape.home" . }}}
{{- end }}

{{- define "trainyard.shape.home" -}}
/home/trainyard
{{- end }}

{{- define "trainyard.shape.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Environment variables of Ray containers. */}}
{{- define "trainyard.shape.rayEnv" -}}
{{ include "trainyard.shape.env" . }}
{{ include "trainyard.shape.usageStatsEnv" . }}
{{- end }}

{{- define "trainyard.shape.usageStatsEnv" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end }}

{{- define "trainyard.shape.homeEnv" -}}
- {name: HOME, value: {{ include "trainyard.shape.home" . }}}
{{- end }}

{{/* Environment variables of all containers with the storage: the home directory, and access to S3. */}}
{{- define "trainyard.shape.env" -}}
{{ include "trainyard.shape.homeEnv" . }}
{{- if not .Values.storage.claim }}
{{- with .Values.storage.s3 }}
- {name: AWS_REGION, value: {{ .region | quote }}}
{{- if .endpoint }}
{{- /* S3 servers other than AWS reject requests for its newer checksums. */}}
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
