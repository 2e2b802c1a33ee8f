{{/*
Fails with all values that cannot work. The schema checks types and ranges. This template checks combinations of keys and
what the cluster must serve. Each message gives the value, the rule and the remedy.
*/}}
{{- define "trainyard.requirements" -}}
{{- $values := .Values -}}
{{- $problems := list -}}

{{- if not (.Capabilities.APIVersions.Has "ray.io/v1/RayJob") -}}
  {{- $problems = append $problems "the cluster does not serve ray.io/v1 RayJob. Install the KubeRay operator with its CRDs first. For `helm template`, which contacts no cluster, add --api-versions ray.io/v1/RayJob." -}}
{{- end -}}

{{- if not (regexMatch ":[^/]+$" $values.image) -}}
  {{- $problems = append $problems (printf "image %s has no tag, so runs would not be reproducible. Set a fixed tag or a digest, such as %s:0.1.0." $values.image $values.image) -}}
{{- else if hasSuffix ":latest" $values.image -}}
  {{- $problems = append $problems (printf "image %s has the tag latest, so runs would not be reproducible. Set a fixed tag or a digest." $values.image) -}}
{{- end -}}

{{- if semverCompare "<2.53.0-0" $values.rayVersion -}}
  {{- $problems = append $problems (printf "rayVersion %s is below 2.53.0. For such versions the operator's health probes need programs that the image does not have. Use an image with Ray 2.53.0 or newer." $values.rayVersion) -}}
{{- end -}}

{{- if and $values.job.separateAttempts (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) -}}
  {{- $problems = append $problems (printf "job.separateAttempts is true, but Kubernetes %s does not support mismatchLabelKeys and would also separate the workers of one attempt. Upgrade Kubernetes to 1.31 or newer, or set job.separateAttempts to false. For `helm template`, which contacts no cluster, add --kube-version." .Capabilities.KubeVersion.Version) -}}
{{- end -}}

{{- $claim := $values.storage.claim -}}
{{- $s3 := $values.storage.s3 -}}
{{- if and $claim $s3.path -}}
  {{- $problems = append $problems (printf "storage.claim (%s) and storage.s3.path (%s) are both set, but runs have one storage. Set storage.claim to null to use S3, or storage.s3.path to \"\" to use the claim." $claim.name $s3.path) -}}
{{- else if not (or $claim $s3.path) -}}
  {{- $problems = append $problems "storage.claim and storage.s3.path are both unset, but a run needs a storage that outlives its pods. Set one of them." -}}
{{- end -}}
{{- if $claim -}}
  {{- if has (clean $claim.mountPath) (list "/" "/tmp" "/dev/shm" "/home/trainyard") -}}
    {{- $problems = append $problems (printf "storage.claim.mountPath %s is a path that the pods use for other files. Use another path, such as /mnt/trainyard." $claim.mountPath) -}}
  {{- end -}}
{{- end -}}

{{- $problems = concat $problems (include "trainyard.data.requirements" . | fromYamlArray) -}}

{{- with $values.notify -}}
  {{- if and .url .secret -}}
    {{- $problems = append $problems "notify.url and notify.secret are both set, but a message has one receiver. Set notify.url to \"\", or notify.secret to {}. A Secret may hold several addresses." -}}
  {{- end -}}
{{- end -}}

{{- range $name, $pool := $values.pools -}}
  {{- $gpus := int $pool.gpusPerNode -}}
  {{- $workers := int $pool.workersPerNode -}}
  {{- if has $name (list "head" "headgroup") -}}
    {{- $problems = append $problems (printf "pools.%s has the name that KubeRay and Kueue use for the group of the head. Use another name." $name) -}}
  {{- end -}}
  {{- if not (or $gpus $workers) -}}
    {{- $problems = append $problems (printf "pools.%s has no number of workers per node. Set gpusPerNode (one worker per GPU), or workersPerNode for nodes without GPUs." $name) -}}
  {{- else if and $gpus $workers -}}
    {{- $problems = append $problems (printf "pools.%s has gpusPerNode %d and workersPerNode %d, but a pool with GPUs has one worker per GPU. Remove workersPerNode." $name $gpus $workers) -}}
  {{- else if and $workers $pool.gpuMemoryGib -}}
    {{- $problems = append $problems (printf "pools.%s has gpuMemoryGib, but no GPUs. Remove gpuMemoryGib." $name) -}}
  {{- end -}}
  {{- with $pool.network -}}
    {{- if and (has .preset (list "infiniband" "roce")) (not .resource) -}}
      {{- $problems = append $problems (printf "pools.%s.network.preset %s needs resource, the resource name of the nodes' devices. Set it, for example to rdma/hca_shared_devices_a." $name .preset) -}}
    {{- else if and (eq .preset "tcp") (or .resource .devicesPerNode) -}}
      {{- $problems = append $problems (printf "pools.%s.network.preset tcp uses no devices. Remove resource and devicesPerNode, or use infiniband, roce or efa." $name) -}}
    {{- end -}}
  {{- end -}}
  {{- if and $pool.cpuRequest (gt (float64 $pool.cpuRequest) (float64 $pool.cpus)) -}}
    {{- $problems = append $problems (printf "pools.%s.cpuRequest %v is above its cpus %v, but a request cannot exceed the limit. Lower cpuRequest or raise cpus." $name $pool.cpuRequest $pool.cpus) -}}
  {{- end -}}
{{- end -}}

{{- $pools := keys $values.pools | sortAlpha | join ", " -}}
{{- $gpuPool := get $values.pools $values.defaultPools.gpus -}}
{{- if not $gpuPool -}}
  {{- $problems = append $problems (printf "defaultPools.gpus %s is not a pool. Use one of the pools: %s." $values.defaultPools.gpus $pools) -}}
{{- else if not (int $gpuPool.gpusPerNode) -}}
  {{- $problems = append $problems (printf "defaultPools.gpus %s is a pool without GPUs. Use a pool with gpusPerNode." $values.defaultPools.gpus) -}}
{{- end -}}
{{- $workerPool := get $values.pools $values.defaultPools.workers -}}
{{- if not $workerPool -}}
  {{- $problems = append $problems (printf "defaultPools.workers %s is not a pool. Use one of the pools: %s." $values.defaultPools.workers $pools) -}}
{{- else if int $workerPool.gpusPerNode -}}
  {{- $problems = append $problems (printf "defaultPools.workers %s is a pool with GPUs. Use a pool with workersPerNode." $values.defaultPools.workers) -}}
{{- end -}}
{{- if and $values.rayCluster.enabled (not (hasKey $values.pools $values.rayCluster.pool)) -}}
  {{- $problems = append $problems (printf "rayCluster.pool %s is not a pool. Use one of the pools: %s." $values.rayCluster.pool $pools) -}}
{{- end -}}

{{- if and $values.rayCluster.enabled $values.rayCluster.idleMinutes (not $values.elastic.enabled) -}}
  {{- $problems = append $problems "rayCluster.idleMinutes needs Ray's autoscaler, which elastic.enabled = false forbids. Set elastic.enabled to true, or rayCluster.idleMinutes to 0." -}}
{{- end -}}

{{- range $name := $values.prePull.pools -}}
  {{- if not (hasKey $values.pools $name) -}}
    {{- $problems = append $problems (printf "prePull.pools contains %s, which is not a pool. Use one of the pools: %s." $name $pools) -}}
  {{- end -}}
{{- end -}}

{{- $queue := $values.queue -}}
{{- $kueue := $queue.kueue -}}
{{- if and $queue.name (eq $queue.system "none") -}}
  {{- $problems = append $problems (printf "queue.name %s is set, but queue.system is none, so no run would use the queue. Set queue.system, or set queue.name to \"\"." $queue.name) -}}
{{- end -}}
{{- if and $kueue.clusterQueue (ne $queue.system "kueue") -}}
  {{- $problems = append $problems (printf "queue.kueue.clusterQueue %s is set, but queue.system is %s. Set queue.system to kueue, or queue.kueue.clusterQueue to \"\"." $kueue.clusterQueue $queue.system) -}}
{{- else if $kueue.clusterQueue -}}
  {{- if not $queue.name -}}
    {{- $problems = append $problems (printf "queue.kueue.clusterQueue %s is set without queue.name: its LocalQueue needs a name. Set queue.name, for example to runs." $kueue.clusterQueue) -}}
  {{- end -}}
  {{- if not (include "trainyard.kueue.apiVersion" (dict "chart" . "kind" "LocalQueue")) -}}
    {{- $problems = append $problems "queue.kueue.clusterQueue is set, but the cluster does not serve kueue.x-k8s.io LocalQueue. Install Kueue first, or set queue.kueue.clusterQueue to \"\". For `helm template`, which contacts no cluster, add --api-versions kueue.x-k8s.io/v1beta2/LocalQueue." -}}
  {{- end -}}
{{- else if $kueue.nodes -}}
  {{- $problems = append $problems "queue.kueue.nodes is set without queue.kueue.clusterQueue: there is no ClusterQueue for these quotas. Set queue.kueue.clusterQueue, or set queue.kueue.nodes to {}." -}}
{{- end -}}
{{- if and $kueue.cohort (not $kueue.nodes) -}}
  {{- $problems = append $problems (printf "queue.kueue.cohort %s is set without queue.kueue.nodes: the ClusterQueue is created by others. Set queue.kueue.nodes, or set queue.kueue.cohort to \"\"." $kueue.cohort) -}}
{{- end -}}
{{- if and $kueue.elastic (ne $queue.system "kueue") -}}
  {{- $problems = append $problems (printf "queue.kueue.elastic is true, but queue.system is %s. Set queue.system to kueue, or queue.kueue.elastic to false." $queue.system) -}}
{{- else if and $kueue.elastic (not $values.elastic.enabled) -}}
  {{- $problems = append $problems "queue.kueue.elastic is true, but elastic.enabled is false, so there are no elastic runs. Set elastic.enabled to true, or queue.kueue.elastic to false." -}}
{{- end -}}
{{- range $name, $_ := $kueue.nodes -}}
  {{- if not (hasKey $values.pools $name) -}}
    {{- $problems = append $problems (printf "queue.kueue.nodes contains %s, which is not a pool. Use one of the pools: %s." $name $pools) -}}
  {{- end -}}
{{- end -}}
{{- if $values.priorityClasses -}}
  {{- if not (has $queue.system (list "kueue" "volcano")) -}}
    {{- $problems = append $problems (printf "priorityClasses are set, but with queue.system %s a run file cannot set a priority. Use kueue or volcano, or set priorityClasses to []." $queue.system) -}}
  {{- else if and (eq $queue.system "kueue") (not (include "trainyard.kueue.apiVersion" (dict "chart" . "kind" "WorkloadPriorityClass"))) -}}
    {{- $problems = append $problems "priorityClasses are set, but the cluster does not serve kueue.x-k8s.io WorkloadPriorityClass. Install Kueue first, or set priorityClasses to []. For `helm template`, which contacts no cluster, add --api-versions kueue.x-k8s.io/v1beta2/WorkloadPriorityClass." -}}
  {{- end -}}
{{- end -}}

{{- range $key, $kind := dict "podMonitor" "PodMonitor" "prometheusRule" "PrometheusRule" -}}
  {{- if and (get $values.monitoring $key).enabled (not ($.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind))) -}}
    {{- $problems = append $problems (printf "monitoring.%s.enabled is true, but the cluster does not serve monitoring.coreos.com/v1 %s. Install the Prometheus operator first, or set it to false. For `helm template`, which contacts no cluster, add --api-versions monitoring.coreos.com/v1/%s." $key $kind $kind) -}}
  {{- end -}}
{{- end -}}

{{- $network := $values.security.networkPolicy -}}
{{- if and $network.enabled $values.elastic.enabled (not $network.apiServerCidrs) -}}
  {{- $problems = append $problems "security.networkPolicy.enabled would block the API server for the autoscaler of elastic runs. Set security.networkPolicy.apiServerCidrs (`kubectl get endpointslices -n default` shows its addresses), or set elastic.enabled to false." -}}
{{- end -}}
{{- if and $network.enabled $values.notify.watch.enabled (not $values.elastic.enabled) (not $network.apiServerCidrs) -}}
  {{- $problems = append $problems "security.networkPolicy.enabled would block the API server for the CronJob of notify.watch. Set security.networkPolicy.apiServerCidrs (`kubectl get endpointslices -n default` shows its addresses), or set notify.watch.enabled to false." -}}
{{- end -}}
{{- if and $network.enabled $values.monitoring.progress.enabled (not $values.elastic.enabled) (not $network.apiServerCidrs) -}}
  {{- $problems = append $problems "security.networkPolicy.enabled would block the API server for the CronJob of monitoring.progress. Set security.networkPolicy.apiServerCidrs (`kubectl get endpointslices -n default` shows its addresses), or set monitoring.progress.enabled to false." -}}
{{- end -}}
{{- range $direction := list "ingress" "egress" -}}
  {{- range $number, $rule := get $network $direction -}}
    {{- if not (or $rule.cidrs $rule.namespaces) -}}
      {{- $problems = append $problems (printf "security.networkPolicy.%s.%d has neither cidrs nor namespaces, which would allow all peers. Set one of them; the CIDR 0.0.0.0/0 allows all addresses." $direction $number) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}

{{- if gt (float64 $values.head.cpuRequest) (float64 $values.head.cpus) -}}
  {{- $problems = append $problems (printf "head.cpuRequest %v is above head.cpus %v, but a request cannot exceed the limit. Lower cpuRequest or raise cpus." $values.head.cpuRequest $values.head.cpus) -}}
{{- end -}}

{{- $problems = concat $problems (include "trainyard.placement.spotProblems" . | fromYamlArray) -}}
{{- $problems = concat $problems (include "trainyard.placement.topologyProblems" . | fromYamlArray) -}}
{{- $problems = concat $problems (include "trainyard.podRequirements" . | fromYamlArray) -}}

{{- $credentials := list -}}
{{- range $key, $value := omit $values "global" -}}
  {{- $credentials = concat $credentials (include "trainyard.requirements.credentials" (dict "path" $key "value" $value) | fromYamlArray) -}}
{{- end -}}
{{- range $credentials -}}
  {{- $problems = append $problems (printf "%s contains a credential, which everyone with access to the Helm release could read. Put the credential into a Secret and set the name of the Secret (storage.s3.secretName, imagePullSecrets, pod.envFrom), or use a cloud role (serviceAccount.annotations)." .) -}}
{{- end -}}

{{- with $problems -}}
  {{- fail (printf "\n%s" (join "\n" .)) -}}
{{- end -}}
{{- end }}

{{/*
The paths of values that are plain credentials, as a YAML list: URLs with a password, AWS access keys, private keys, and
values of keys whose name ends in password, secret key, access key, API key or token. The values themselves are never
printed. Arguments: path, value.
*/}}
{{- define "trainyard.requirements.credentials" -}}
{{- $path := .path -}}
{{- $found := list -}}
{{- if kindIs "map" .value -}}
  {{- range $key, $value := .value -}}
    {{- $found = concat $found (include "trainyard.requirements.credentials" (dict "path" (printf "%s.%s" $path $key) "value" $value) | fromYamlArray) -}}
  {{- end -}}
{{- else if kindIs "slice" .value -}}
  {{- range $number, $value := .value -}}
    {{- $found = concat $found (include "trainyard.requirements.credentials" (dict "path" (printf "%s.%d" $path $number) "value" $value) | fromYamlArray) -}}
  {{- end -}}
{{- else if kindIs "string" .value -}}
  {{- $isNamedSo := regexMatch "(?i)(password|passwd|secret[-_]?(access[-_]?)?key|access[-_]?key([-_]?id)?|api[-_]?key|token)$" $path -}}
  {{- $looksSo := regexMatch "://[^/\\s:@]+:[^/\\s@]+@|\\b(AKIA|ASIA)[0-9A-Z]{16}\\b|-----BEGIN [A-Z ]*PRIVATE KEY" .value -}}
  {{- if and .value (or $isNamedSo $looksSo) -}}
    {{- $found = append $found $path -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}
