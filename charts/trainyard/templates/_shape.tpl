{{/*
The shape: the pod templates of a Ray cluster, and the reader pod. They exist only here. The platform's ConfigMap and the
standing RayCluster include "trainyard.shape". The launcher copies it from the platform into each RayJob.

All pods satisfy Pod Security "restricted". Security settings and volume mounts are set on the Ray container, because
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
authOptions:
  mode: {{ ternary "token" "disabled" $chart.Values.security.tokenAuthentication }}
headGroupSpec:
  rayStartParams:
    {{- /* Without logical CPUs, Ray schedules no tasks or actors on the head. Only the driver runs there. */}}
    num-cpus: "0"
  template:
    metadata:
      labels:
        {{- include "trainyard.podLabels" $chart | nindent 8 }}
    spec:
      {{- include "trainyard.shape.pod" (dict "chart" $chart "nodes" $head "isRun" $isRun) | nindent 6 }}
      {{- /* The preStop hook below takes up to 45 s, and the head needs some seconds to terminate. */}}
      terminationGracePeriodSeconds: 60
      containers:
        - name: ray-head
          {{- include "trainyard.shape.container" $chart | nindent 10 }}
          {{- if not $isRun }}
          image: {{ $chart.Values.image | quote }}
          resources:
            {{- include "trainyard.sizes.resources" $head | nindent 12 }}
          {{- end }}
          lifecycle:
            preStop:
              exec:
                {{- /* A driver that holds the lease of a run lets its workers save a checkpoint and releases the lease. See
                trainyard_trainer.on_ray.leaving. */}}
                command: [sh, -c, touch "$TRAINYARD_LEAVING"; flock --timeout 45 "$TRAINYARD_LEAVING" true]
          ports:
            {{- /* If any ports are declared, the operator finds the dashboard by this name. */}}
            - {name: dashboard, containerPort: {{ include "trainyard.ports.dashboard" . }}}
            - {name: gcs-server, containerPort: 6379}
            - {name: metrics, containerPort: {{ include "trainyard.ports.metrics" . }}}
          env:
            {{- include "trainyard.shape.rayEnv" $chart | nindent 12 }}
            {{- /* The head needs no drain: after the hook no work is left, and a drain would last for its whole timeout. */}}
            - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}
            {{- /* Ray declares a node dead after five failed health checks. With these values that takes 30 s for a node
            that stops responding. With Ray's defaults (3 s between checks, timeout 10 s) it takes 65 s. */}}
            - {name: RAY_health_check_period_ms, value: "1000"}
            - {name: RAY_health_check_timeout_ms, value: "5000"}
            {{- /* Time that a stopped driver has to let its workers save a checkpoint. Ray's default is 3 s. */}}
            - {name: RAY_JOB_STOP_WAIT_TIME_S, value: "40"}
            {{- /* The driver also writes its log to the container's output, for `kubectl logs` and log collectors. */}}
            - {name: TRAINYARD_LOG, value: /proc/1/fd/1}
            - {name: TRAINYARD_LEAVING, value: /tmp/leaving}
workerGroupSpecs:
  {{- range $name := .pools }}
  {{- $pool := get $chart.Values.pools $name }}
  - groupName: {{ $name | quote }}
    {{- if not $isRun }}
    {{- range list "replicas" "minReplicas" "maxReplicas" }}
    {{ . }}: {{ int $chart.Values.rayCluster.replicas }}
    {{- end }}
    {{- end }}
    rayStartParams: {}
    template:
      metadata:
        labels:
          {{- include "trainyard.podLabels" $chart | nindent 10 }}
      spec:
        {{- include "trainyard.shape.pod" (dict "chart" $chart "nodes" $pool "isRun" $isRun) | nindent 8 }}
        {{- /* Longer than the drain below, during which workers save a checkpoint. */}}
        terminationGracePeriodSeconds: 90
        containers:
          - name: ray-worker
            {{- include "trainyard.shape.container" $chart | nindent 12 }}
            {{- if not $isRun }}
            image: {{ $chart.Values.image | quote }}
            resources:
              {{- include "trainyard.sizes.resources" (include "trainyard.sizes.pool" $pool | fromYaml) | nindent 14 }}
            {{- end }}
            env:
              {{- include "trainyard.shape.rayEnv" $chart | nindent 14 }}
              - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "60"}
              {{- /* Keep idle worker processes for the data tasks of the next epoch, because a new process needs seconds to
              import its modules. Ray's default is 1 s. */}}
              - {name: RAY_idle_worker_killing_time_threshold_ms, value: "600000"}
  {{- end }}
{{- end }}

{{/*
Ray's autoscaler, which the operator adds to the head pod of an elastic run. It is the only container with the token of the
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
and deadline.
*/}}
{{- define "trainyard.shape.reader" -}}
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
{{- end }}

{{/*
Service account, security context and node selection of a pod. Arguments: chart; nodes: a pool or the head of the values,
for nodeSelector and tolerations; isRun: whether the pod is a head or worker of a run.
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
{{- with .nodes.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodes.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .isRun $values.job.separateAttempts }}
{{- /* Each attempt has its own RayCluster. Kubernetes considers a lost node ready for a while, and would place the pods of
       the next attempt there. */}}
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
