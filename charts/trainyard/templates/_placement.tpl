{{/*
On which nodes pods run: the node selector and tolerations of the head or of a pool, with those of `spot` for spot pools. All
other pods avoid spot nodes. The workers of a run are packed by a pool's `topologyKey` and `topologyMode`: by Kueue if it is the
queue system, since it knows whether all of them have room in a domain, else by the scheduler.
*/}}

{{/* The node selector and tolerations of the head or of a pool. Arguments: chart; nodes: the head or a pool of the values. */}}
{{- define "trainyard.placement.nodes" -}}
{{- $spot := dict -}}
{{- if .nodes.spot -}}
  {{- $spot = .chart.Values.spot -}}
{{- end -}}
{{- $selector := merge (dict) (.nodes.nodeSelector | default dict) ($spot.nodeSelector | default dict) -}}
{{- $tolerations := concat (.nodes.tolerations | default list) ($spot.tolerations | default list) -}}
{{- toYaml (dict "nodeSelector" $selector "tolerations" $tolerations) -}}
{{- end }}

{{/*
The affinity of a pod, before what the values set for pods; an empty map without any. Arguments: as for
"trainyard.shape.identity".
*/}}
{{- define "trainyard.placement.affinity" -}}
{{- $affinity := dict -}}
{{- $terms := include "trainyard.placement.offSpot" . | fromYamlArray -}}
{{- if $terms -}}
  {{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) -}}
{{- end -}}
{{- if and .isRun .chart.Values.job.separateAttempts -}}
  {{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list (include "trainyard.placement.otherAttempts" . | fromYaml))) -}}
{{- end -}}
{{- if and .isWorkerOfRun .nodes.topologyKey (ne .chart.Values.queue.system "kueue") (ne .nodes.topologyMode "unconstrained") -}}
  {{- $term := include "trainyard.placement.otherWorkers" . | fromYaml -}}
  {{- $_ := set $affinity "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end }}

{{/* The annotations by which Kueue packs the workers of a run; an empty map without any. Arguments: chart, nodes, isRun. */}}
{{- define "trainyard.placement.annotations" -}}
{{- $annotations := dict -}}
{{- if and .isRun .nodes.topologyKey (eq .chart.Values.queue.system "kueue") -}}
  {{- $mode := .nodes.topologyMode | default "preferred" -}}
  {{- $_ := set $annotations (printf "kueue.x-k8s.io/podset-%s-topology" $mode) (ternary "true" .nodes.topologyKey (eq $mode "unconstrained")) -}}
{{- end -}}
{{- toYaml $annotations -}}
{{- end }}

{{/*
The annotations by which Kueue places the head of a run; an empty map without any. If heads share the flavor of a pool that has
a topology, Kueue assigns it only to pods that ask for a place in a topology. Arguments: chart, isRun.
*/}}
{{- define "trainyard.placement.headAnnotations" -}}
{{- $annotations := dict -}}
{{- $kueue := .chart.Values.queue.kueue -}}
{{- $areKnown := true -}}
{{- range $name, $_ := $kueue.nodes -}}
  {{- $areKnown = and $areKnown (hasKey $.chart.Values.pools $name) -}}
{{- end -}}
{{- if and .isRun $areKnown $kueue.clusterQueue $kueue.nodes -}}
  {{- if (first (include "trainyard.queue.quotas" .chart | fromYaml).flavors).topologyKey -}}
    {{- $_ := set $annotations "kueue.x-k8s.io/podset-unconstrained-topology" "true" -}}
  {{- end -}}
{{- end -}}
{{- toYaml $annotations -}}
{{- end }}

{{/*
Node selector terms that keep pods off spot nodes, as a YAML list: empty for spot pools, and if there is no spot pool.
A node matches if one of its labels differs from those of spot nodes. Arguments: chart, nodes.
*/}}
{{- define "trainyard.placement.offSpot" -}}
{{- $terms := list -}}
{{- $hasSpotPools := false -}}
{{- range .chart.Values.pools -}}
  {{- $hasSpotPools = or $hasSpotPools .spot -}}
{{- end -}}
{{- if and $hasSpotPools (not .nodes.spot) -}}
  {{- range $key, $value := .chart.Values.spot.nodeSelector -}}
    {{- $terms = append $terms (dict "matchExpressions" (list (dict "key" $key "operator" "NotIn" "values" (list $value)))) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $terms -}}
{{- end }}

{{/*
Node selector terms that require both of two lists, as a YAML list. Kubernetes requires one term of a list, so each term of the
first is combined with each of the second. Arguments: first, second.
*/}}
{{- define "trainyard.placement.bothTerms" -}}
{{- $terms := list -}}
{{- range $one := .first -}}
  {{- range $other := $.second -}}
    {{- $both := dict -}}
    {{- range $key := list "matchExpressions" "matchFields" -}}
      {{- with concat (get $one $key | default list) (get $other $key | default list) -}}
        {{- $_ := set $both $key . -}}
      {{- end -}}
    {{- end -}}
    {{- $terms = append $terms $both -}}
  {{- end -}}
{{- end -}}
{{- toYaml $terms -}}
{{- end }}

{{/*
The pods of earlier attempts of the same run, as a term of an anti-affinity. Each attempt has its own RayCluster. Kubernetes
considers a lost node ready for a while, and would place the pods of the next attempt there.
*/}}
{{- define "trainyard.placement.otherAttempts" -}}
topologyKey: kubernetes.io/hostname
labelSelector:
  matchLabels: {ray.io/is-ray-node: "yes"}
matchLabelKeys: [trainyard.io/run]
mismatchLabelKeys: [ray.io/cluster]
{{- end }}

{{/* The other workers of the same group of the same RayCluster, as a term of an affinity. The group is not named, because the
launcher names it. Arguments: nodes. */}}
{{- define "trainyard.placement.otherWorkers" -}}
topologyKey: {{ .nodes.topologyKey | quote }}
labelSelector:
  matchLabels: {ray.io/node-type: worker}
matchLabelKeys: [ray.io/cluster, ray.io/group]
{{- end }}

{{/* Problems of `topologyKey` and `topologyMode`, as a YAML list of sentences. The argument is the chart. */}}
{{- define "trainyard.placement.topologyProblems" -}}
{{- $problems := list -}}
{{- $values := .Values -}}
{{- range $name, $pool := $values.pools -}}
  {{- if and $pool.topologyMode (not $pool.topologyKey) -}}
    {{- $problems = append $problems (printf "pools.%s.topologyMode is %s, but the pool has no topologyKey, so there is nothing by which its workers could be packed. Set topologyKey, or remove topologyMode." $name $pool.topologyMode) -}}
  {{- else if and $pool.topologyMode (ne $pool.topologyMode "preferred") (ne $values.queue.system "kueue") -}}
    {{- $problems = append $problems (printf "pools.%s.topologyMode is %s, but queue.system is %s: the scheduler places one pod after the other and cannot know whether all of them have room in a domain. Set queue.system to kueue, or topologyMode to preferred." $name $pool.topologyMode $values.queue.system) -}}
  {{- end -}}
  {{- if $pool.topologyKey -}}
    {{- if ne $values.queue.system "kueue" -}}
      {{- if semverCompare "<1.31.0-0" $.Capabilities.KubeVersion.Version -}}
        {{- $problems = append $problems (printf "pools.%s.topologyKey is set, but Kubernetes %s does not support matchLabelKeys in affinities and would pack the workers of all runs together. Upgrade Kubernetes to 1.31 or newer, or remove topologyKey. For `helm template`, which contacts no cluster, add --kube-version." $name $.Capabilities.KubeVersion.Version) -}}
      {{- end -}}
    {{- else if hasKey $values.queue.kueue.nodes $name -}}
      {{- if not (include "trainyard.kueue.apiVersion" (dict "chart" $ "kind" "Topology")) -}}
        {{- $problems = append $problems (printf "pools.%s.topologyKey is set, but the cluster does not serve kueue.x-k8s.io Topology. Upgrade Kueue to 0.14 or newer, or remove topologyKey. For `helm template`, which contacts no cluster, add --api-versions kueue.x-k8s.io/v1beta2/Topology." $name) -}}
      {{- end -}}
      {{- if not (include "trainyard.placement.nodes" (dict "chart" $ "nodes" $pool) | fromYaml).nodeSelector -}}
        {{- $problems = append $problems (printf "pools.%s.topologyKey is set and its nodeSelector is empty, but Kueue needs a label of the nodes whose topology it reads. Set nodeSelector." $name) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}

{{/*
Problems of the values about spot nodes, as a YAML list of sentences. The argument is the chart.
*/}}
{{- define "trainyard.placement.spotProblems" -}}
{{- $problems := list -}}
{{- $selector := .Values.spot.nodeSelector -}}
{{- $spotPools := list -}}
{{- $others := dict "head" .Values.head -}}
{{- range $name, $pool := .Values.pools -}}
  {{- if $pool.spot -}}
    {{- $spotPools = append $spotPools $name -}}
    {{- range $key, $value := $selector -}}
      {{- if hasKey ($pool.nodeSelector | default dict) $key -}}
        {{- $problems = append $problems (printf "pools.%s.nodeSelector contains %s, which spot.nodeSelector sets to %s for pools with spot: true. Remove it from the pool." $name $key $value) -}}
      {{- end -}}
    {{- end -}}
  {{- else -}}
    {{- $_ := set $others (printf "pools.%s" $name) $pool -}}
  {{- end -}}
{{- end -}}
{{- if and $spotPools (not $selector) -}}
  {{- $problems = append $problems (printf "pools.%s.spot is true, but spot.nodeSelector is empty, so the pool would have no label that selects spot nodes. Set spot.nodeSelector, such as {karpenter.sh/capacity-type: spot}; values-eks.yaml, values-gke.yaml and values-aks.yaml contain it." (first $spotPools)) -}}
{{- else if $spotPools -}}
  {{- range $path, $nodes := $others -}}
    {{- $selectsSpot := true -}}
    {{- range $key, $value := $selector -}}
      {{- $selectsSpot = and $selectsSpot (eq (get ($nodes.nodeSelector | default dict) $key) $value) -}}
    {{- end -}}
    {{- if $selectsSpot -}}
      {{- $problems = append $problems (printf "%s.nodeSelector selects spot nodes, which only pools with spot: true use. %s" $path (ternary "Select other nodes: a run that loses its head starts again from its last checkpoint." "Set spot: true, or select other nodes." (eq $path "head"))) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}
