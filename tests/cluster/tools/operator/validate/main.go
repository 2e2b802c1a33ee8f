// Reads RayJobs and RayClusters, one JSON object per line, and answers each with a line that holds what
// KubeRay's own validation says of it: nothing, or its error. The launcher's rules are compared with it.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	rayv1 "github.com/ray-project/kuberay/ray-operator/apis/ray/v1"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/utils"
)

func validate(line []byte) error {
	var kind struct{ Kind string }
	if err := json.Unmarshal(line, &kind); err != nil {
		return err
	}
	if kind.Kind == "RayCluster" {
		var cluster rayv1.RayCluster
		if err := json.Unmarshal(line, &cluster); err != nil {
			return err
		}
		return errors.Join(
			utils.ValidateRayClusterMetadata(cluster.ObjectMeta),
			utils.ValidateRayClusterSpec(&cluster.Spec, cluster.Annotations),
			utils.ValidateRayClusterUpgradeOptions(&cluster),
		)
	}
	var job rayv1.RayJob
	if err := json.Unmarshal(line, &job); err != nil {
		return err
	}
	err := errors.Join(utils.ValidateRayJobMetadata(job.ObjectMeta), utils.ValidateRayJobSpec(&job))
	if job.Spec.RayClusterSpec != nil {
		// The operator makes this RayCluster of the RayJob.
		cluster := rayv1.RayCluster{Spec: *job.Spec.RayClusterSpec}
		cluster.Labels = map[string]string{utils.RayOriginatedFromCRDLabelKey: string(utils.RayJobCRD)}
		err = errors.Join(err, utils.ValidateRayClusterUpgradeOptions(&cluster))
	}
	return err
}

func main() {
	lines := bufio.NewReader(os.Stdin)
	for {
		line, end := lines.ReadBytes('\n')
		if len(strings.TrimSpace(string(line))) > 0 {
			said := ""
			if err := validate(line); err != nil {
				said = strings.ReplaceAll(err.Error(), "\n", "; ")
			}
			fmt.Println(said)
		}
		if end != nil {
			return
		}
	}
}
