"""YAML blocks of the documentation, as the config's own parser reads them."""

from __future__ import annotations

from typing import Any

import yaml

from raafl.config.experiment import Experiment
from raafl.config.parse import parse
from raafl.devices.files import load_devices
from raafl.lab.compare.compared import read_sweep
from raafl.lab.compare.search import check_space
from raafl.sites.policy import load_policy
from tests.docs.blocks import Block
from tests.habits.source import ROOT

BASE: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()) | {
    "algorithm": {"class_path": "raafl.fed_buff"}  # merges several updates at a time, as some options want
}


def check_yaml(block: Block) -> None:
    """Load a block: a site's policy, a config, part of one (the quick start has the rest), a sweep, or a list of devices."""
    data = yaml.safe_load(block.text)
    if block.file == "site.yaml":
        load_policy(block.file)  # the page has written it
        return
    if isinstance(data, list):
        with open("devices.yaml", "w", encoding="utf-8") as file:
            file.write(block.text)
        assert load_devices("devices.yaml")
        return
    if "rows" in data:  # a comparison, which the page's command reads
        return
    if "fields" in data:
        found = read_sweep(data).comparison()
        check_space(found, found.search)
        return
    base = {name: value for name, value in BASE.items() if "trainer" not in data or name not in ("model", "data")}
    whole = base | data
    if isinstance(whole["devices"], list):  # a part of a config need not go with four clients
        whole["clients"] = data.get("clients", sum(device.get("count", 1) for device in whole["devices"]))
    with open("block.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump(whole, file)
    experiment: Experiment = parse("simulate", ["--config", "block.yaml"]).experiment
    experiment.check()
