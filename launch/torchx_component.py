"""A component of torchx: raafl's ranks on whatever it schedules to (this machine, SLURM, Kubernetes, a cloud's batch service).

torchx run --scheduler local_cwd launch/torchx_component.py:fit --config configs/quickstart.yaml -- --max_updates 20
torchx run --scheduler kubernetes launch/torchx_component.py:fit --config quickstart --j 2x4 --image raafl:cuda --gpu 4
"""

# torchx reads the annotations of a component as they are: they may not be postponed
from torchx import specs
from torchx.components import dist


def fit(
    *options: str,
    config: str = "quickstart",
    j: str = "1x5",
    image: str = "raafl:cpu",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,  # torchx's own spelling
    max_retries: int = 0,
) -> specs.AppDef:
    """Train on ranks that torchrun starts: the first coordinates, each other one is a client.

    Args:
        options: of raafl fit, behind --.
        config: the run's config, a file or the name of one that comes with raafl.
        j: nodes x ranks on each.
        image: for schedulers that run containers.
        cpu: cores of a node.
        gpu: GPUs of a node; add --fabric.accelerator cuda to the options.
        memMB: memory of a node in MB.
        max_retries: how often the scheduler starts a job again.
    """
    nodes, _, ranks = j.rpartition("x")
    clients = int(nodes or 1) * int(ranks) - 1
    words = ("fit", "--config", config, "--clients", str(clients), *options)
    start = dist.torchrun if hasattr(dist, "torchrun") else dist.ddp  # its name up to torchx 0.7
    return start(
        *words,
        m="raafl",
        name="raafl/",
        j=f"{nodes or 1}x{ranks}",
        image=image,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        max_retries=max_retries,
    )
