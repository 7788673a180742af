"""Image data: sources, a decoded cache, augmentation, and pipelines that yield batches.

In order of use: `prepare` once per node, `open_data` in every worker, `make_pipeline` for each of
the two sets. Downloads, unpacked archives and caches may lie in this folder; git ignores them.
"""

from __future__ import annotations

from data.images import Data, ImageSet
from data.pipeline import Pipeline, make_pipeline
from data.sources import open_data, prepare

__all__ = ["Data", "ImageSet", "Pipeline", "make_pipeline", "open_data", "prepare"]
