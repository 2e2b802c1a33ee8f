{{/*
Refuses values that cannot work, all at once. Types and ranges are the schema's; here is what
concerns several keys, and what the cluster must have. Each message: the value, the rule, the remedy.
*/}}
{{- define "trainyard.requirements" -}}
{{- $values := .Values -}}
{{- $problems := list -}}

{{- if not (.Capabilities.APIVersions.Has "ray.io/v1/RayJob") -}}
  {{- $problems = append $problems "the cluster does not know ray.io/v1 RayJob. Install the KubeRay operator with its CRDs first (`helm template` asks no cluster: give it --api-versions ray.io/v1/RayJob)." -}}
{{- end -}}

{{- if not (regexMatch ":[^/]+$" $values.image) -}}
  {{- $problems = append $problems (printf "image %s has no tag: a run must be repeatable. Give a fixed tag or a digest, such as %s:0.1.0." $values.image $values.image) -}}
{{- else if hasSuffix ":latest" $values.image -}}
  {{- $problems = append $problems (printf "image %s changes under a run: a run must be repeatable. Give a fixed tag or a digest." $values.image) -}}
{{- end -}}

{{- if semverCompare "<2.53.0-0" $values.rayVersion -}}
  {{- $problems = append $problems (printf "rayVersion %s is too old: below 2.53.0 the operator probes pods with programs that the image lacks. Use an image with Ray 2.53.0 or newer." $values.rayVersion) -}}
{{- end -}}

{{- $claim := $values.storage.claim -}}
{{- $s3 := $values.storage.s3 -}}
{{- if and $claim $s3.path -}}
  {{- $problems = append $problems (printf "storage.claim (%s) and storage.s3.path (%s) are both set: runs have one storage. Set storage.claim to null to use S3, or storage.s3.path to \"\" to use the claim." $claim.name $s3.path) -}}
{{- else if not (or $claim $s3.path) -}}
  {{- $problems = append $problems "neither storage.claim nor storage.s3.path is set: a run needs a storage that outlives its pods. Set one of them." -}}
{{- end -}}
{{- if $claim -}}
  {{- if has (clean $claim.mountPath) (list "/" "/tmp" "/dev/shm" "/home/trainyard") -}}
    {{- $problems = append $problems (printf "storage.claim.mountPath %s is taken by the pods themselves. Use a folder of its own, such as /mnt/trainyard." $claim.mountPath) -}}
  {{- end -}}
{{- end -}}

{{- range $name, $pool := $values.pools -}}
  {{- $gpus := int $pool.gpusPerNode -}}
  {{- $workers := int $pool.workersPerNode -}}
  {{- if has $name (list "head" "headgroup") -}}
    {{- $problems = append $problems (printf "pools.%s has the name that KubeRay and Kueue give to the head's group. Use another name." $name) -}}
  {{- end -}}
  {{- if not (or $gpus $workers) -}}
    {{- $problems = append $problems (printf "pools.%s does not say how many workers a node holds. Set gpusPerNode (one worker per GPU), or workersPerNode for nodes without GPUs." $name) -}}
  {{- else if and $gpus $workers -}}
    {{- $problems = append $problems (printf "pools.%s has gpusPerNode %d and workersPerNode %d: a pool with GPUs has one worker per GPU. Remove workersPerNode." $name $gpus $workers) -}}
  {{- end -}}
  {{- if and $pool.cpuRequest (gt (float64 $pool.cpuRequest) (float64 $pool.cpus)) -}}
    {{- $problems = append $problems (printf "pools.%s.cpuRequest %v is above its cpus %v: a pod cannot reserve more than its limit. Lower cpuRequest or raise cpus." $name $pool.cpuRequest $pool.cpus) -}}
  {{- end -}}
{{- end -}}

{{- $pools := keys $values.pools | sortAlpha | join ", " -}}
{{- $gpuPool := get $values.pools $values.defaultPools.gpus -}}
{{- if not $gpuPool -}}
  {{- $problems = append $problems (printf "defaultPools.gpus %s is not a pool. There are: %s." $values.defaultPools.gpus $pools) -}}
{{- else if not (int $gpuPool.gpusPerNode) -}}
  {{- $problems = append $problems (printf "defaultPools.gpus %s is a pool without GPUs. Name one with gpusPerNode." $values.defaultPools.gpus) -}}
{{- end -}}
{{- $workerPool := get $values.pools $values.defaultPools.workers -}}
{{- if not $workerPool -}}
  {{- $problems = append $problems (printf "defaultPools.workers %s is not a pool. There are: %s." $values.defaultPools.workers $pools) -}}
{{- else if int $workerPool.gpusPerNode -}}
  {{- $problems = append $problems (printf "defaultPools.workers %s is a pool with GPUs. Name one with workersPerNode." $values.defaultPools.workers) -}}
{{- end -}}
{{- if and $values.rayCluster.enabled (not (hasKey $values.pools $values.rayCluster.pool)) -}}
  {{- $problems = append $problems (printf "rayCluster.pool %s is not a pool. There are: %s." $values.rayCluster.pool $pools) -}}
{{- end -}}

{{- if gt (float64 $values.head.cpuRequest) (float64 $values.head.cpus) -}}
  {{- $problems = append $problems (printf "head.cpuRequest %v is above head.cpus %v: a pod cannot reserve more than its limit. Lower cpuRequest or raise cpus." $values.head.cpuRequest $values.head.cpus) -}}
{{- end -}}

{{- with $problems -}}
  {{- fail (printf "\n%s" (join "\n" .)) -}}
{{- end -}}
{{- end }}
