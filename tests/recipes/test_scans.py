"""Scans: NIfTI and NPZ files, members of shards, the threshold, and one line for what can't be read."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from support.messages import refuses
from support.needs import needs
from support.quick import quick

from recipes.scans import ExampleScans, Repeated, ScanFolder, decode, head_or_air, make_sample, of_members, threshold
from trainer.errors import ConfigError, DataError, UnavailableError

pytestmark = needs("monai", "nibabel")
RNG = np.random.default_rng(0)


def nifti(values: np.ndarray) -> bytes:
    import nibabel

    return gzip.compress(nibabel.Nifti1Image(values, np.eye(4)).to_bytes())


def scan(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    image = RNG.normal(100, 20, shape).astype(np.float32)
    return image, (image > 110).astype(np.uint8)


def write(root: Path, name: str, image: np.ndarray, label: np.ndarray) -> None:
    for folder, values in (("images", image), ("labels", label)):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / f"{name}.nii.gz").write_bytes(nifti(values))


def test_a_nifti_file_comes_back() -> None:
    image, _ = scan((5, 6, 7))
    assert (decode(nifti(image), "x") == image).all() and (decode(gzip.decompress(nifti(image)), "x") == image).all()


@pytest.mark.parametrize("data", [b"", b"no scan", gzip.compress(b"no scan", mtime=0)], ids=["empty", "text", "gzip"])
def test_bytes_that_are_no_scan_are_named(data: bytes) -> None:
    with refuses("a.nii", "decoded", kind=DataError):
        decode(data, "a.nii")


def test_intensities_are_normalised_in_each_channel() -> None:
    image, label = scan((8, 9))
    made = make_sample(np.stack([image, 5 * image], -1), label, 2, 2, "x")
    assert made["image"].shape == (2, 8, 9) and made["label"].dtype == np.int64
    assert made["image"].mean((1, 2)) == pytest.approx([0, 0], abs=1e-5)
    assert made["image"].std((1, 2)) == pytest.approx([1, 1], abs=1e-5)


def test_other_shapes_are_damage() -> None:
    with refuses("x", "(8, 9)", "(9, 8)", kind=DataError):
        make_sample(np.zeros((8, 9)), np.zeros((9, 8)), 2, 2, "x")
    with refuses("x", "differ", kind=DataError):
        make_sample(np.zeros((8, 9)), np.zeros((8, 9, 2)), 3, 2, "x")


def test_wrong_settings_end_the_run_and_lose_no_sample() -> None:
    with refuses("recipe.dimensions=2", "3", "recipe.dimensions=3"):
        make_sample(np.zeros((8, 9, 4)), np.zeros((8, 9, 4)), 2, 2, "x")
    with refuses("recipe.dimensions=3", "4", "2", "3"):
        make_sample(np.zeros((2, 2, 2, 2)), np.zeros((2, 2, 2, 2)), 3, 2, "x")
    classes = r"^recipe\.classes=2: the label of x has classes 0 to 3; set recipe\.classes=4$"
    with pytest.raises(ConfigError, match=classes):
        make_sample(np.zeros((2, 2)), np.array([[0, 3], [0, 0]]), 2, 2, "x")
    with refuses("recipe.classes=2", "-1", "0", "0"):
        make_sample(np.zeros((2, 2)), np.array([[0, -1], [0, 0]]), 2, 2, "x")


def test_slices_of_volumes(tmp_path: Path) -> None:
    image, label = scan((6, 7, 5))
    write(tmp_path, "a", image, label)
    write(tmp_path, "b", *scan((4, 4, 2)))
    slices, volumes = (ScanFolder(tmp_path, dimensions, 2, "recipe.train") for dimensions in (2, 3))
    assert (len(slices), len(volumes)) == (7, 2)
    assert (slices[3]["label"] == label[..., 3]).all() and (volumes[0]["label"] == label).all()
    assert slices[6]["image"].shape == (1, 4, 4) and slices.fingerprint != volumes.fingerprint
    # A slice has the mean and the deviation of its volume.
    assert slices[3]["image"][0] == pytest.approx((image[..., 3] - image.mean()) / image.std(), abs=1e-4)
    assert volumes[0]["image"][0] == pytest.approx((image - image.mean()) / image.std(), abs=1e-4)


def test_files_that_are_not_compressed(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "a", "x", *scan((6, 7, 5)))
    for path in sorted((tmp_path / "a").rglob("*.gz")):
        plain = tmp_path / "b" / path.parent.name / "x.nii"
        plain.parent.mkdir()
        plain.write_bytes(gzip.decompress(path.read_bytes()))
    for dimensions, samples in ((2, 5), (3, 1)):
        packed, plain = (ScanFolder(tmp_path / name, dimensions, 2, "recipe.train") for name in ("a", "b"))
        assert len(packed) == len(plain) == samples
        for i in range(samples):
            assert all(np.array_equal(packed[i][name], plain[i][name]) for name in ("image", "label"))
    (tmp_path / "b" / "images" / "x.nii").write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.nii: can't be decoded"):
        ScanFolder(tmp_path / "b", 2, 2, "recipe.train")[0]


def test_the_start_reads_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", *scan((6, 7, 5)))
    image, label = scan((6, 7, 3))
    (tmp_path / "npz").mkdir()
    np.savez_compressed(tmp_path / "npz" / "a.npz", image=image, label=label)
    monkeypatch.setattr("recipes.scans.decode", None)
    monkeypatch.setattr("numpy.load", None)
    found = [ScanFolder(folder, 2, 2, "recipe.train") for folder in (tmp_path, tmp_path / "npz")]
    assert [len(each) for each in found] == [5, 3]


def test_the_fingerprint_has_the_labels(tmp_path: Path) -> None:
    image, label = scan((6, 7, 5))
    write(tmp_path, "a", image, label)
    before = ScanFolder(tmp_path, 3, 2, "recipe.train").fingerprint
    write(tmp_path, "a", image, RNG.integers(0, 2, label.shape).astype(np.int32))
    assert ScanFolder(tmp_path, 3, 2, "recipe.train").fingerprint != before


def test_scans_without_labels_are_for_predictions(tmp_path: Path) -> None:
    image, label = scan((6, 7, 5))
    write(tmp_path, "a", image, label)
    labelled = [each["image"] for each in ScanFolder(tmp_path, 2, 2, "recipe.val", labelled=False)]
    for path in (tmp_path / "labels").iterdir():
        path.unlink()
    (tmp_path / "labels").rmdir()
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "a.npz", image=np.stack([image, image], -1))
    nifti_, npz = (ScanFolder(tmp_path / name, 2, 2, "k", n, labelled=False) for name, n in ((".", 1), ("npz", 2)))
    assert len(labelled) == len(nifti_) == len(npz) == 5 and nifti_[2].keys() == npz[2].keys() == {"image"}
    assert (nifti_[2]["image"] == labelled[2]).all() and npz[2]["image"].shape == (2, 6, 7)
    with refuses("recipe.train", "labels/a.nii.gz"):
        ScanFolder(tmp_path, 2, 2, "recipe.train")
    with refuses("recipe.train", "a.npz", "labels/NAME.nii.gz"):
        ScanFolder(tmp_path / "npz", 2, 2, "recipe.train", 2)
    assert of_members({"__key__": "a", "npz": {"image": image}}, 3, 2).keys() == {"image"}


def test_npz_files(tmp_path: Path) -> None:
    image, label = scan((6, 7))
    np.savez(tmp_path / "a.npz", image=image, label=label)
    assert (ScanFolder(tmp_path, 2, 2, "recipe.train")[0]["label"] == label).all()


def test_an_image_without_a_label(tmp_path: Path) -> None:
    write(tmp_path, "a", *scan((4, 4)))
    (tmp_path / "labels" / "a.nii.gz").unlink()
    with refuses("recipe.val", "labels/a.nii.gz"):
        ScanFolder(tmp_path, 2, 2, "recipe.val")
    with refuses("recipe.val", "images/NAME.nii.gz", "NAME.npz"):
        ScanFolder(tmp_path / "labels", 2, 2, "recipe.val")


def damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    return {"empty": b"", "truncated": content[:middle], "flipped": flipped, "other": b"no scan"}[how]


@pytest.mark.parametrize("how", ["empty", "truncated", "flipped", "other"])
def test_a_damaged_npz_is_one_bad_sample(how: str, tmp_path: Path) -> None:
    image, label = scan((40, 30))
    for name in ("a", "b"):
        np.savez_compressed(tmp_path / f"{name}.npz", image=image, label=label)
    (tmp_path / "a.npz").write_bytes(damaged((tmp_path / "a.npz").read_bytes(), how))
    found = ScanFolder(tmp_path, 2, 2, "recipe.train")
    assert len(found) == 2 and (found[1]["label"] == label).all()
    with pytest.raises(DataError, match=r"a\.npz: can't be decoded .*; write it again or remove it$"):
        found[0]


def test_an_npz_of_other_arrays_is_one_bad_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", other=np.zeros(3))
    with pytest.raises(DataError, match=r"a\.npz: has no array image; write it again or remove it$"):
        ScanFolder(tmp_path, 2, 2, "recipe.train")[0]


def test_a_scan_that_is_gone_is_not_damaged(tmp_path: Path) -> None:
    write(tmp_path, "a", *scan((4, 4)))
    found = ScanFolder(tmp_path, 2, 2, "recipe.train")
    (tmp_path / "images" / "a.nii.gz").unlink()
    with pytest.raises(UnavailableError, match=r"a\.nii\.gz: .*No such file.*; fix the cause, then resume$"):
        found[0]


def test_members_of_shards() -> None:
    image, label = scan((6, 7))
    packed = of_members({"__key__": "a", "image.nii.gz": nifti(image), "label.nii.gz": nifti(label)}, 2, 2)
    arrays = of_members({"__key__": "a", "npz": {"image": image, "label": label}}, 2, 2)
    assert (packed["image"] == arrays["image"]).all() and (packed["label"] == label).all()
    with refuses("recipe.train", "image.nii.gz"):
        of_members({"__key__": "a", "txt": "a"}, 2, 2)


def test_the_threshold_is_between_two_classes() -> None:
    values = np.concatenate([RNG.normal(0, 1, 3000), RNG.normal(10, 1, 1000)])
    best = max(np.linspace(-2, 12, 141), key=lambda t: between(values, float(t)))
    assert between(values, threshold(values)) == pytest.approx(between(values, float(best)), rel=1e-3)


def between(values: np.ndarray, at: float) -> float:
    """The variance between the classes, as Otsu defines it."""
    above = values[values > at]
    share = len(above) / len(values)
    return share * (1 - share) * (above.mean() - values[values <= at].mean()) ** 2


@pytest.mark.parametrize(("dimensions", "counts"), quick([(3, (2, 2)), (2, (36, 12))]))
def test_the_example_is_split_and_has_both_classes(dimensions: int, counts: tuple[int, int]) -> None:
    train, val = (ExampleScans(split, dimensions) for split in ("train", "val"))
    assert (len(train), len(val)) == counts and train.fingerprint != val.fingerprint
    assert all(0.05 < each["label"].mean() < 0.95 for each in (train[0], val[0]))
    assert not np.array_equal(train[0]["image"], val[0]["image"])


def test_a_bright_ball_is_the_head() -> None:
    at = np.indices((24, 24, 24)) - 12
    ball = (np.square(at).sum(0) < 64).astype(np.float32)
    found = head_or_air(1000 * ball + RNG.random(ball.shape).astype(np.float32))
    assert 2 * (found * ball).sum() / (found.sum() + ball.sum()) > 0.9


def test_an_epoch_has_several_patches_of_each_scan() -> None:
    own = ExampleScans("train", 3)
    made = Repeated(own, 5)
    assert len(made) == 10 and made[7]["label"] is own[1]["label"] and made.fingerprint != own.fingerprint
