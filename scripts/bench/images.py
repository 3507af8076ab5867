"""Measures how many JPEGs one core decodes, crops and resizes, compared with torchvision, webdataset and DALI.

    python -m scripts.bench.images [--quick] [--rounds 5] [--loaders NAME,...] [--json FILE]

Every loader turns the same JPEGs into batches of random crops of 224 x 224 bytes, half of them mirrored, as for
training a ResNet. It has one thread and no data workers. A rate is images per second of the process's CPU time, so
other work on the machine matters little. A turn is one epoch in a process of its own. Every loader has a turn in each
round. Images count from the second batch on. A loader that is not installed has no row.

The images are generated: smooth colours, shapes and grain, with quality 90. They are of two sizes. "Pillow" is Echelon
without LazyJpeg. "torchvision" is its ImageFolder with transforms v2 on Pillow's images; in "torchvision tensors" its
own decoder reads the files. "Decode alone" has no crop. The bench takes about 6 minutes.
"""

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import DataLoader

from scripts.bench.harness import Goal, Report, Rounds, Row, Turn, alone, at_least, installed, parser
from scripts.command import command
from trainer.config.options import DataOptions
from trainer.data.batch import Split
from trainer.data.images import Augment, LazyJpeg
from trainer.data.loader import Loader
from trainer.data.opening import open_source
from trainer.data.shards.decoders import image_of_bytes
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import ConfigError, nearest

SIZE, BATCH, DISTINCT = 224, 16, 24  # pixels of a side; images of a batch; different images, of which there are copies
GOALS = {"Pillow": 1.4}  # times this loader's images per second; 1 for the others


@dataclass(frozen=True)
class Photos:
    """The same JPEGs as tar shards and as a folder with a folder per class."""

    folder: Path
    width: int
    height: int
    count: int

    @property
    def files(self) -> list[str]:
        return sorted(map(str, self.folder.glob("classes/*/*.jpg")))

    @property
    def shards(self) -> list[str]:
        return sorted(map(str, self.folder.glob("tar/*.tar")))

    def write(self) -> None:
        contents = [jpeg(scene(self.width, self.height, seed)) for seed in range(DISTINCT)]
        samples = [{"__key__": f"{i:06d}", "jpg": contents[i % DISTINCT], "cls": i % 2} for i in range(self.count)]
        write_shards(samples, self.folder / "tar", "train", -(-self.count // 8))
        for sample in samples:
            file = self.folder / "classes" / str(sample["cls"]) / f"{sample['__key__']}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(sample["jpg"])


def scene(width: int, height: int, seed: int) -> Image.Image:
    """Return a picture of smooth colours, shapes and grain, which is more like a photo than noise is."""
    draws = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(width, height)
    pixels = np.full((height, width, 3), 128.0)
    for channel in range(3):
        for octave in range(4):
            fx, fy = draws.uniform(0.5, 3 << octave, 2)
            pixels[..., channel] += 60 / 2**octave * np.sin(2 * np.pi * (fx * x + fy * y) + draws.uniform(0, 6))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(40):
        at, half = draws.uniform((0, 0), (width, height)), draws.uniform(0.01, 0.15, 2) * max(width, height)
        shape = pen.ellipse if draws.random() < 0.5 else pen.rectangle
        shape([*(at - half), *(at + half)], fill=tuple(draws.integers(0, 256, 3).tolist()))
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(1))) + draws.normal(0, 6, (height, width, 1))
    return Image.fromarray(soft.clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


class Recipe:
    def __init__(self, shards: list[str]) -> None:
        self.shards = shards

    def data(self, split: str) -> Any:
        return self.shards if split == "train" else None

    def transform(self, sample: dict[str, Any], rng: Any) -> Any:
        return sample["jpg"]


def echelon(photos: Photos, lazy: bool = True) -> Iterator[int]:
    options = DataOptions(workers=0, decoders=[LazyJpeg()] if lazy else [], map=[Augment(SIZE)])
    recipe: Any = Recipe(photos.shards)
    source = open_source(recipe, "train", 0, options)
    assert isinstance(source, Samples)
    order = source.order(options.shuffle_shards, options.shuffle_window)
    loader = Loader(source, order, Split(BATCH), options, collate=torch.utils.data.default_collate, weight=len)
    return (sum(step.weights) for step in loader.train(0))


def decode_alone(photos: Photos, lazy: bool) -> Iterator[int]:
    contents = [Path(file).read_bytes() for file in photos.files]
    decoder = LazyJpeg()
    for start in range(0, len(contents), BATCH):
        for content in contents[start : start + BATCH]:
            if lazy:
                decoder("jpg", content).decode()  # pyright: ignore[reportOptionalMemberAccess] each is a JPEG
            else:
                np.asarray(image_of_bytes(content))
        yield len(contents[start : start + BATCH])


def crops() -> Any:
    from torchvision.transforms import v2  # pyright: ignore[reportMissingImports]

    return v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()])


def torchvision(photos: Photos, tensors: bool = False) -> Iterator[int]:
    from torchvision.datasets import ImageFolder  # pyright: ignore[reportMissingImports]
    from torchvision.io import ImageReadMode, decode_image  # pyright: ignore[reportMissingImports]

    own = {"loader": partial(decode_image, mode=ImageReadMode.RGB)} if tensors else {}
    folder = ImageFolder(str(photos.folder / "classes"), crops(), **own)
    return (len(images) for images, _ in DataLoader(folder, BATCH, shuffle=True))


def webdataset(photos: Photos) -> Iterator[int]:
    from webdataset.compat import WebDataset, WebLoader

    made = crops()
    shards = WebDataset(photos.shards, shardshuffle=len(photos.shards), seed=0, empty_check=False)
    samples = shards.shuffle(1000).decode("pil").to_tuple("jpg").map(lambda values: made(values[0]))
    return map(len, WebLoader(samples.batched(BATCH, collation_fn=torch.stack), batch_size=None))


def dali(photos: Photos) -> Iterator[int]:
    from nvidia.dali import fn, pipeline_def, types  # pyright: ignore[reportMissingImports]

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline() -> Any:
        contents, _ = fn.readers.file(files=photos.files, random_shuffle=True, seed=1, prefetch_queue_depth=1)
        area, ratio = [0.08, 1.0], [3 / 4, 4 / 3]
        images = fn.decoders.image_random_crop(
            contents, device="cpu", random_area=area, random_aspect_ratio=ratio, seed=2
        )
        images = fn.resize(images, device="cpu", size=[SIZE, SIZE], interp_type=types.DALIInterpType.INTERP_LINEAR)
        return fn.flip(images, horizontal=fn.random.coin_flip(seed=3))

    made = pipeline()
    made.build()
    while True:
        (images,) = made.run()
        yield len(images)


LOADERS: dict[str, Callable[[Photos], Iterator[int]]] = {
    "Echelon": echelon,
    "Pillow": partial(echelon, lazy=False),
    "decode alone": partial(decode_alone, lazy=True),
    "Pillow decode alone": partial(decode_alone, lazy=False),
    **({"torchvision": torchvision} if installed("torchvision") else {}),
    **({"torchvision tensors": partial(torchvision, tensors=True)} if installed("torchvision") else {}),
    **({"webdataset": webdataset} if installed("torchvision") and installed("webdataset") else {}),
    **({"DALI": dali} if installed("nvidia-dali-cuda120") else {}),
}


def turn(photos: Photos, name: str) -> Turn:
    for path in filter(Path.is_file, photos.folder.rglob("*")):
        path.read_bytes()
    return {"rate": alone(count, name, photos)}


def count(name: str, photos: Photos) -> float:
    """Return images per second of CPU time, from the second batch to the last whole one."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    batches = LOADERS[name](photos)
    first = next(batches)
    began, seen = time.process_time(), 0
    for images in batches:
        seen += images
        if seen + first > photos.count - BATCH:
            break
    return seen / (time.process_time() - began)


def table(photos: Photos, found: Rounds) -> tuple[list[Row], list[Goal]]:
    part = f"{photos.width} x {photos.height} pixels; {len(found.turns['Echelon'])} rounds"
    rows = found.table(part, "loader", {
        "images per CPU second": lambda name: found.median(name, "rate"),
        "of Pillow": lambda name: found.ratio(name, "Pillow", "rate"),
        "Echelon, times this": lambda name: found.ratio("Echelon", name, "rate"),
        "max / min": lambda name: max(found.values(name, "rate")) / min(found.values(name, "rate")),
    })  # fmt: skip
    peers = [name for name in found.turns if name != "Echelon" and "alone" not in name]
    goal = f"{photos.width} x {photos.height}: times "
    return rows, [at_least(f"{goal}{name}", GOALS.get(name, 1), found.ratio("Echelon", name, "rate")) for name in peers]


def main() -> None:
    made = parser(
        "images", __doc__, "a quarter of the images, 1 round: about a minute", "without it 5, or 1 if --quick"
    )
    made.add_argument("--loaders", help=f"separated by commas, of {', '.join(LOADERS)}; without it all")
    args = made.parse_args()
    rounds, scale = args.rounds or (1 if args.quick else 5), 4 if args.quick else 1
    names = list(dict.fromkeys(["Echelon", "Pillow", *(args.loaders.split(",") if args.loaders else LOADERS)]))
    for name in names:
        if name not in LOADERS:
            raise ConfigError(f"--loaders {name}: no such loader is installed; {nearest(name, list(LOADERS))}")
    packages = ("torch", "numpy", "pillow", "simplejpeg", "torchvision", "webdataset", "nvidia-dali-cuda120")
    with Report(args.json, packages) as report, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for width, height, images in ((500, 375, 960), (2000, 1500, 192)):
            photos = Photos(Path(folder) / str(width), width, height, images // scale)
            photos.write()
            next(echelon(photos))  # makes the index
            found = Rounds.of(names).run(rounds, partial(turn, photos), f"{width} x {height}, ")
            report.add(*table(photos, found))


if __name__ == "__main__":
    command(main)
