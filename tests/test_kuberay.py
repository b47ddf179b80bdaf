"""The manifest for KubeRay has only fields that its RayCluster knows, and the command in it only options that there are.

`kuberay_raycluster.json` holds names and types of the fields of KubeRay's own schema, as deep as the manifest goes.
"""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from headrace.cli import make_parser

HERE = Path(__file__).parent
MANIFEST = yaml.safe_load((HERE.parent / "docs" / "kuberay.yaml").read_text())
SCHEMA = jsonschema.Draft202012Validator(json.loads((HERE / "kuberay_raycluster.json").read_text()))


def test_kuberay_knows_every_field_and_headrace_every_option():
    SCHEMA.validate(MANIFEST)
    front = next(group for group in MANIFEST["spec"]["workerGroupSpecs"] if group["groupName"] == "front")
    pod = front["template"]["spec"]
    _, _, command = pod["containers"][0]["args"][0].partition("exec headrace ")
    args = make_parser().parse_args(shlex.split(command))
    assert args.ray == "auto" and args.drain_timeout < pod["terminationGracePeriodSeconds"]
    cores = next(group for group in MANIFEST["spec"]["workerGroupSpecs"] if group["groupName"] == "cores")
    assert (args.min_replicas, args.max_replicas) == (cores["minReplicas"], cores["maxReplicas"])
    mounts = [group["template"]["spec"]["containers"][0]["volumeMounts"] for group in (front, cores)]
    assert mounts[0] == mounts[1] and args.model.startswith(mounts[0][0]["mountPath"])


@pytest.mark.parametrize("path", [("spec", "headGroup"), ("spec", "workerGroupSpecs", 0, "replica"), ("spec", "headGroupSpec", "template", "spec", "container")])
def test_a_misspelled_field_would_be_noticed(path):
    manifest = copy.deepcopy(MANIFEST)
    *above, name = path
    place = manifest
    for step in above:
        place = place[step]
    place[name] = 1
    assert not SCHEMA.is_valid(manifest)
