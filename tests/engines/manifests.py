"""Reads objects of Kubernetes, JobSet and Kubeflow's Trainer as JSON lines, and fails at one that does not fit its type.

The types are those of PyPI's kubeflow_trainer_api, generated from the OpenAPI schemas of all three. They leave out
unknown fields, so every field must be there after reading and writing. Patterns, enumerations and rules of admission
are not in these types.
"""

import json
import sys

from kubeflow_trainer_api import models

PREFIXES = {
    "v1": "IoK8sApiCoreV1",
    "batch/v1": "IoK8sApiBatchV1",
    "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2",
    "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1",
}


def lost(given, kept, path):
    """Paths that `kept` does not have, or with another value. Defaults may be added."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [p for key in given for p in lost(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [p for i in range(len(given)) for p in lost(given[i], kept[i], f"{path}[{i}]")]
    return [] if given == kept else [path]


for line in sys.stdin:
    given = json.loads(line)
    kind = getattr(models, PREFIXES[given["apiVersion"]] + given["kind"])
    paths = lost(given, json.loads(kind.from_json(line).to_json()), given["kind"])
    if paths:
        sys.exit("no such field: " + ", ".join(paths))
    print("fits", given["kind"])
