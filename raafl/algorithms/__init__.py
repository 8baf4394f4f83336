"""Published methods, one file or package each; importing a factory here registers it.

Everything else derives from these imports: `ALGORITHMS`, `raafl.NAME`, `raafl algorithms`, shell completion and the pages of
the documentation.
"""

from __future__ import annotations

from collections.abc import Callable

from raafl.algorithms.ada_vit import ada_vit as ada_vit
from raafl.algorithms.ca2fl import ca2fl as ca2fl
from raafl.algorithms.co_s2p import co_s2p as co_s2p
from raafl.algorithms.depth_fl import depth_fl as depth_fl
from raafl.algorithms.diloco import diloco as diloco
from raafl.algorithms.fadas import fadas as fadas
from raafl.algorithms.fed_async import fed_async as fed_async
from raafl.algorithms.fed_avg import fed_avg as fed_avg
from raafl.algorithms.fed_buff import fed_buff as fed_buff
from raafl.algorithms.fed_compass import fed_compass as fed_compass
from raafl.algorithms.fed_dyn import fed_dyn as fed_dyn
from raafl.algorithms.fed_mezo import fed_mezo as fed_mezo
from raafl.algorithms.fed_nova import fed_nova as fed_nova
from raafl.algorithms.fed_opt import fed_opt as fed_opt
from raafl.algorithms.fed_per import fed_per as fed_per
from raafl.algorithms.fed_pm import fed_pm as fed_pm
from raafl.algorithms.fed_prox import fed_prox as fed_prox
from raafl.algorithms.fed_raa import fed_raa as fed_raa
from raafl.algorithms.fed_rolex import fed_rolex as fed_rolex
from raafl.algorithms.fiarse import fiarse as fiarse
from raafl.algorithms.fjord import fjord as fjord
from raafl.algorithms.hetero_fl import hetero_fl as hetero_fl
from raafl.algorithms.ist import ist as ist
from raafl.algorithms.moon import moon as moon
from raafl.algorithms.oap import oap as oap
from raafl.algorithms.platon import platon as platon
from raafl.algorithms.prune_fl import prune_fl as prune_fl
from raafl.algorithms.q_vit import q_vit as q_vit
from raafl.algorithms.ra_fed import ra_fed as ra_fed
from raafl.algorithms.ram_fed import ram_fed as ram_fed
from raafl.algorithms.scaffold import scaffold as scaffold
from raafl.algorithms.scale_fl import scale_fl as scale_fl
from raafl.algorithms.split_fed import split_fed as split_fed
from raafl.algorithms.streaming_diloco import streaming_diloco as streaming_diloco
from raafl.algorithms.timely_fl import timely_fl as timely_fl
from raafl.core.algorithm import Algorithm as Algorithm

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    name: factory
    for name, factory in sorted(globals().items())
    if getattr(factory, "__module__", "") == f"{__name__}.{name}"
}
"""The factory of each method, by its name."""
