import fcntl
import gzip
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raafl.data import CIFAR10, CIFAR100, MNIST, Digits, Dirichlet, FederatedData, HuggingFace, readers
from raafl.errors import BadInput
from tests.data.modules import set_up
from tests.helpers.refusals import cannot_lock

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(raw, zipped=False):
    """Four small idx files; returns the pixels and labels by split."""
    rng = np.random.default_rng(0)
    raw.mkdir(parents=True)
    data = {}
    for stem, n in (("train", 7), ("t10k", 4)):
        pixels, labels = rng.integers(0, 256, (n, 28, 28)), np.arange(n) % 10
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = idx_bytes(array)
            path = raw / f"{stem}-{kind}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)
        data[stem] = (pixels, labels)
    return data


def test_digits_equal_those_scikit_learn_loads():
    from sklearn.datasets import load_digits

    reference = load_digits()
    images, labels = readers.read_digits()
    assert np.array_equal(images.flatten(1).numpy() * 16, reference.data)
    assert np.array_equal(labels.numpy(), reference.target)
    assert images.shape == (1797, 1, 8, 8) and images.dtype == torch.float32 and images.max() == 1


def test_digits_split_is_stratified_and_seeded():
    module = set_up(Digits())
    assert isinstance(module.train, TensorDataset)
    per_class = torch.bincount(readers.read_digits()[1])
    held_out = torch.bincount(module.test.tensors[1])
    assert held_out.tolist() == [round(0.2 * n) for n in per_class.tolist()]
    assert len(module.train) + len(module.test) == 1797
    same, other = set_up(Digits()), set_up(Digits(seed=1))
    assert torch.equal(module.test.tensors[0], same.test.tensors[0])
    assert not torch.equal(module.test.tensors[0], other.test.tensors[0])


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("layout", ["torchvision/MNIST/raw", "MNIST/raw"])
def test_mnist_reads_either_layout_plain_or_zipped(tmp_path, layout, zipped):
    data = write_mnist(tmp_path / layout, zipped)
    module = set_up(MNIST(tmp_path, download=False))
    for dataset, stem in ((module.train, "train"), (module.test, "t10k")):
        pixels, labels = data[stem]
        x, y = dataset.gather(torch.arange(len(labels)))
        expected = (torch.tensor(pixels, dtype=torch.float32) / 255 - 0.1307) / 0.3081
        assert torch.allclose(x[:, 0], expected, atol=1e-5) and y.tolist() == labels.tolist()


def test_pixels_are_left_in_0_to_1_without_normalisation(tmp_path):
    pixels, _ = write_mnist(tmp_path / "MNIST" / "raw")["train"]
    x, _ = set_up(MNIST(tmp_path, download=False, normalize=False)).train.gather(torch.arange(7))
    assert torch.equal(x[:, 0], torch.tensor(pixels, dtype=torch.float32) / 255)


def test_damaged_idx_files_are_named(tmp_path):
    good = idx_bytes(np.zeros((2, 28, 28)))
    for content in (good[:-1], b"\0\0\x0d" + good[3:], b"\0", good + b"x"):
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(content)
        with pytest.raises(BadInput, match="train-images-idx3-ubyte is not a complete idx file"):
            readers.read_idx(path)


@pytest.mark.parametrize("kind", [MNIST, CIFAR10, CIFAR100])
def test_missing_data_names_the_places_and_the_remedy(tmp_path, kind):
    with pytest.raises(BadInput) as caught:
        kind(tmp_path, download=False).prepare_data()
    message = str(caught.value)
    assert kind.__name__ in message and str(tmp_path) in message and "RAAFL_DATA" in message and "download" in message
    with pytest.raises(BadInput, match="is not in"):
        kind(tmp_path, download=False).setup("fit")


def test_a_failed_download_is_told_as_missing_data(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")

    def offline(root, train, download):
        raise OSError(
            "Error downloading train.gz:\nTried a.example, got:\nno route to host\n"
        )  # as torchvision says it

    monkeypatch.setattr(torchvision.datasets, "MNIST", offline)
    with pytest.raises(
        BadInput, match=r"MNIST is not in .*the download failed: .* got: no route to host\): set root"
    ) as error:
        MNIST(tmp_path).prepare_data()
    assert "\n" not in str(error.value)


def test_a_download_goes_where_it_is_then_looked_for(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")

    def fetch(root, train, download):
        if train:
            write_mnist(tmp_path / "new" / "MNIST" / "raw")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fetch)
    assert len(set_up(MNIST(tmp_path / "new")).train) == 7


def test_root_defaults_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path))
    assert MNIST().root == tmp_path
    monkeypatch.delenv("RAAFL_DATA")
    assert MNIST().root.parts[-2:] == (".cache", "raafl")
    assert MNIST(tmp_path / "x").root == tmp_path / "x"


def write_parquet(path, pixels, labels, image_column="img", mode=None, label_column="label"):
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    features = datasets.Features({image_column: datasets.Image(), label_column: datasets.Value("int64")})
    rows = {image_column: [Image.fromarray(p, mode) for p in pixels], label_column: list(labels)}
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """CIFAR-10's layout with a few random images, and the user's cache out of the way."""
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "user")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    write_parquet(tmp_path / "root" / "cifar10" / "train.parquet", pixels[:4], [3, 1, 2, 0])
    write_parquet(tmp_path / "root" / "cifar10" / "plain_text" / "test-00000-of-00001.parquet", pixels[4:], [9, 8])
    return tmp_path / "root", pixels


def test_cifar10_decodes_parquet_and_keeps_the_bytes(small_cifar10, monkeypatch):
    root, pixels = small_cifar10
    module = set_up(CIFAR10(root, download=False))
    assert np.array_equal(module.train.images.numpy(), pixels[:4].transpose(0, 3, 1, 2))
    assert np.array_equal(module.test.images.numpy(), pixels[4:].transpose(0, 3, 1, 2))
    assert module.train.labels.tolist() == [3, 1, 2, 0] and module.test.labels.tolist() == [9, 8]

    def never(sources):
        raise AssertionError("decoded twice")

    monkeypatch.setattr(readers, "_read_image_parquet", never)
    assert torch.equal(set_up(CIFAR10(root, download=False)).train.images, module.train.images)
    assert not (root.parent / "user").exists()  # the first place that can be written is the only one used


def test_cifar100_has_the_fine_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "user")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    for split, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        labels = [99, 0, 7, 50, 3][rows]
        write_parquet(tmp_path / "cifar100" / f"{split}.parquet", pixels[rows], labels, label_column="fine_label")
    module = set_up(CIFAR100(tmp_path, download=False))
    assert module.train.labels.tolist() == [99, 0, 7] and module.test.labels.tolist() == [50, 3]
    assert np.array_equal(module.train.images.numpy(), pixels[:3].transpose(0, 3, 1, 2))
    few = set_up(CIFAR100(tmp_path, download=False, num_train=2, num_test=1))
    assert few.train.indices == [0, 1] and few.test.indices == [0]


def test_changed_files_are_decoded_anew(small_cifar10):
    root, pixels = small_cifar10
    set_up(CIFAR10(root, download=False))
    write_parquet(root / "cifar10" / "train.parquet", pixels[:3], [5, 5, 5])
    assert set_up(CIFAR10(root, download=False)).train.labels.tolist() == [5, 5, 5]


def test_a_folder_that_cannot_be_written_is_no_obstacle(small_cifar10, monkeypatch, tmp_path):
    root, pixels = small_cifar10
    writable = [tmp_path / "user" / ".raafl"]
    monkeypatch.setattr(
        readers, "_is_writable", lambda folder: folder in writable and not folder.mkdir(parents=True, exist_ok=True)
    )
    assert np.array_equal(set_up(CIFAR10(root, download=False)).train.images.numpy(), pixels[:4].transpose(0, 3, 1, 2))
    assert len(list((tmp_path / "user" / ".raafl").glob("*.npy"))) == 4 and not (root / ".raafl").exists()
    monkeypatch.setattr(readers, "_USER_CACHE", tmp_path / "nobody")
    assert np.array_equal(set_up(CIFAR10(root, download=False)).train.images.numpy(), pixels[:4].transpose(0, 3, 1, 2))
    assert not (tmp_path / "nobody").exists()


def test_a_folder_in_which_nothing_can_be_locked_is_no_obstacle(small_cifar10, monkeypatch):
    """Reading data ended with an error of the system there; at worst two processes decode the same."""
    root, pixels = small_cifar10
    monkeypatch.setattr(fcntl, "flock", cannot_lock)
    assert np.array_equal(set_up(CIFAR10(root, download=False)).train.images.numpy(), pixels[:4].transpose(0, 3, 1, 2))
    assert len(list((root / ".raafl").glob("*.npy"))) == 4


def test_ranks_that_start_together_decode_once(tmp_path):
    source = tmp_path / "source"
    source.write_text("x")
    built = []

    def build():
        built.append(1)
        return np.arange(6, dtype=np.uint8).reshape(2, 3), np.array([4, 5])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: readers.cached([source], tmp_path, "x", build), range(8)))
    assert len(built) == 1
    assert all(a.tolist() == [[0, 1, 2], [3, 4, 5]] and b.tolist() == [4, 5] for a, b in found)
    assert not list(tmp_path.rglob("*.tmp"))


def test_hugging_face_reads_a_folder_of_parquet_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RAAFL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (5, 6, 4), dtype=np.uint8)
    for split, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        write_parquet(tmp_path / "set" / f"{split}-00000.parquet", grey[rows], range(len(grey[rows])), "image")
    module = set_up(HuggingFace(str(tmp_path / "set"), batch_size=2, mean=0.0, std=1.0))
    x, y = module.train.gather(torch.arange(3))
    assert x.shape == (3, 1, 6, 4) and y.tolist() == [0, 1, 2]
    assert torch.allclose(x[:, 0] * 255, torch.tensor(grey[:3], dtype=torch.float32), atol=1e-4)
    assert FederatedData(module, Dirichlet(10.0), 2, 0).batch_size == 2
    for wrong, message in (
        ({"image_column": "img"}, "no column 'img': give one of image, label"),
        ({"test_split": "dev"}, "no split 'dev'"),
    ):
        with pytest.raises(BadInput, match=message):
            set_up(HuggingFace(str(tmp_path / "set"), **wrong))
    with pytest.raises(BadInput, match=r"there is no folder .*nowhere"):
        set_up(HuggingFace(str(tmp_path / "nowhere")))


def test_images_of_different_sizes_are_refused():
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(BadInput, match=r"sizes \[\(2, 2\), \(3, 2\)\]: resize"):
        readers.stack_images([image.new("L", (2, 2)), image.new("L", (3, 2))])
    assert readers.stack_images([image.new("L", (2, 2)), image.new("RGB", (2, 2))]).shape == (2, 3, 2, 2)


@pytest.mark.parametrize(
    "make", [lambda: Digits(batch_size=0), lambda: MNIST(batch_size=0), lambda: Digits(test_share=1.0)]
)
def test_bad_arguments(make):
    with pytest.raises(BadInput, match=r"batch_size is 0|test_share is 1\.0"):
        make()


def test_real_mnist(raafl_data):
    module = set_up(MNIST(raafl_data, download=False))
    assert torch.bincount(module.train.labels).tolist() == MNIST_COUNTS
    assert torch.bincount(module.test.labels).tolist() == MNIST_TEST_COUNTS
    x, _ = module.train.gather(torch.arange(60000))
    assert abs(float(x.mean())) < 1e-3 and abs(float(x.std()) - 1) < 1e-3  # the constants are the set's own


def test_real_mnist_equals_torchvisions(raafl_data):
    datasets = pytest.importorskip("torchvision.datasets")
    module = set_up(MNIST(raafl_data, download=False))
    for ours, train in ((module.train, True), (module.test, False)):
        theirs = datasets.MNIST(str(raafl_data / "torchvision"), train=train)
        assert torch.equal(ours.images[:, 0], theirs.data) and torch.equal(ours.labels, theirs.targets)


def test_real_cifar10(raafl_data):
    module = set_up(CIFAR10(raafl_data, download=False))
    assert torch.bincount(module.train.labels).tolist() == [5000] * 10
    assert torch.bincount(module.test.labels).tolist() == [1000] * 10
    x, _ = module.train.gather(torch.arange(50000))
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=2e-3)
    assert torch.allclose(x.std((0, 2, 3)), torch.ones(3), atol=2e-3)


@pytest.mark.long("test_real_cifar10")  # that its labels are the fine ones is tested on a made file
def test_real_cifar100(raafl_data):
    if not (raafl_data / "cifar100").is_dir():
        pytest.skip("this folder has no CIFAR-100")
    module = set_up(CIFAR100(raafl_data, download=False))
    assert torch.bincount(module.test.labels).tolist() == [100] * 100
    x, _ = module.train.gather(torch.arange(0, len(module.train), 3))
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=3e-2)
    assert torch.allclose(x.std((0, 2, 3)), torch.ones(3), atol=3e-2)


def test_real_cifar10_pixels_equal_the_parquet_files_images(raafl_data):
    datasets = pytest.importorskip("datasets")
    module = set_up(CIFAR10(raafl_data, download=False))
    rows = datasets.Dataset.from_parquet(str(raafl_data / "cifar10" / "test.parquet")).select([0, 1, 5000, 9999])
    for index, row in zip([0, 1, 5000, 9999], rows, strict=True):
        assert np.array_equal(module.test.images[index].permute(1, 2, 0).numpy(), np.asarray(row["img"]))
        assert int(module.test.labels[index]) == row["label"]


def test_torchvisions_cifar10_layout_is_read_through_torchvision(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)

    class Stored:
        def __init__(self, root, train):
            assert root == str(tmp_path)
            self.data, self.targets = (pixels, [7, 0, 2]) if train else (pixels[:1], [7])

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Stored)
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(b"")
    module = set_up(CIFAR10(tmp_path, download=False))
    assert np.array_equal(module.train.images.numpy(), pixels.transpose(0, 3, 1, 2))
    assert module.train.labels.tolist() == [7, 0, 2] and len(module.test) == 1
