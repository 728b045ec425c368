"""Images out of bytes that a client sent. Nothing is decoded before its size is known."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from tandem.router.media.parts import MediaPart
from tandem.router.media.sources import refused

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow decodes by itself, in bounded memory. Of an animation the first picture is taken.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def decode_image(part: MediaPart, data: bytes, max_pixels: int) -> Image:
    """The picture, in RGB. Raises InvalidRequestError that names the part."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise refused(part, "this server lacks Pillow, which reads images: pip install 'tandem-serve[media]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that are ours to judge
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > max_pixels:
                    raise refused(
                        part, f"it has {width} x {height} pixels; at most {max_pixels} are taken (--media-max-pixels)"
                    )
                opened.load()
                turned: Image.Image = ImageOps.exif_transpose(opened)
                return turned.convert("RGB")
    except UnidentifiedImageError:
        raise refused(part, f"its bytes are no image of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, EOFError, OverflowError, Image.DecompressionBombError) as error:
        raise refused(part, f"it can't be decoded: {error}") from None
