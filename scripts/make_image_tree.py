"""Makes a tree of JPEG files for data.name=image_folder: many classes, mixed sizes and colours.

    python scripts/make_image_tree.py images --classes 1000 --train 3 --test 1
    python scripts/make_image_tree.py images --sides 375 500 --truncate train

Every fifth file is grey, every seventh CMYK. The pictures are smooth noise around a colour of their
class, so that a model can learn something of them. With --truncate one file of that set ends in the
middle, as after a broken copy; its path is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image


def main() -> None:
    options = _options()
    draw = np.random.default_rng(options.seed)
    colours = draw.integers(60, 196, (options.classes, 3))
    number = 0
    for split, count in (("train", options.train), ("test", options.test)):
        for label, colour in enumerate(colours):
            folder = options.out / split / f"class-{label:04d}"
            folder.mkdir(parents=True, exist_ok=True)
            for place in range(count):
                size = draw.integers(options.sides[0], options.sides[1] + 1, 2)
                image = picture(colour, size, draw)
                image.convert(_mode(number)).save(folder / f"{place:04d}.jpg", quality=85)
                number += 1
    if options.truncate is not None:
        path = min((options.out / options.truncate).rglob("*.jpg"))
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        print(path)


def picture(colour: np.ndarray, size: np.ndarray, draw: np.random.Generator) -> Image.Image:
    """An RGB image of size (width, height): noise of a few pixels, enlarged, around a colour."""
    noise = draw.normal(0, 40, (6, 6, 3)) + colour
    small = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    return small.resize(tuple(size.tolist()), Image.Resampling.BICUBIC)


def _mode(number: int) -> str:
    if number % 7 == 6:
        return "CMYK"
    return "L" if number % 5 == 4 else "RGB"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder that is made")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--train", type=int, default=3, help="files per class")
    parser.add_argument("--test", type=int, default=1, help="files per class")
    parser.add_argument("--sides", type=int, nargs=2, default=(24, 96), metavar=("LEAST", "MOST"),
                        help="pixels of a side")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--truncate", choices=("train", "test"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
