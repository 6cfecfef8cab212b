"""Tests of decoding: every image becomes RGB with the right colours, or gives a reason."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from dataplane.media import images
from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from tests.dataplane.shards import encode, noise


def decode_image(data: bytes, formats: tuple[str, ...] = (), limits: MediaLimits = DEFAULT_LIMITS) -> Image.Image:
    return images.decode_image(data, formats, limits)[0]


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG whose header claims this size. Its data is one empty stream."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_every_mode_becomes_rgb() -> None:
    rgb = Image.fromarray(noise(1))
    for mode in ("L", "LA", "RGBA", "P", "1"):
        image = rgb.convert(mode)
        assert np.array_equal(np.asarray(decode_image(encode(image))), np.asarray(image.convert("RGB"))), mode
    cmyk = decode_image(encode(rgb.convert("CMYK"), "JPEG"))
    assert (cmyk.mode, cmyk.size) == ("RGB", rgb.size)


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    decoded = np.asarray(decode_image(encode(Image.fromarray(values))))
    assert np.array_equal(decoded[:, :, 0], values >> 8)


def test_exif_orientation_is_applied() -> None:
    image = Image.fromarray(noise(2, height=40, width=80))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 270 degrees
    decoded = decode_image(encode(image, "PNG", exif=exif))
    assert np.array_equal(np.asarray(decoded), np.asarray(image.transpose(Image.Transpose.ROTATE_270)))


def test_a_palette_with_transparency_and_an_animation_give_their_first_frame() -> None:
    frames = [Image.fromarray(noise(at)).convert("P") for at in range(3)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], transparency=0)
    assert decode_image(data).mode == "RGB"


@pytest.mark.parametrize(
    ("data", "formats", "reason"),
    [
        (b"", (), "empty: 0 bytes"),
        (b"GIF89a", (), "not an image of a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", (), "not an image of a known format"),
        (encode(noise(3))[:-100], (), "truncated or corrupt PNG"),
        (encode(noise(3), "JPEG")[:900], (), "truncated or corrupt JPEG"),
        (encode(noise(3), "JPEG"), ("PNG",), "mislabelled: named as PNG, holds JPEG"),
        (png_of_size(60_000, 60_000), (), "decompression bomb: 60000x60000"),
        (png_of_size(0, 5), (), "zero-sized|known format"),
        (png_of_size(5, 5), (), "truncated or corrupt PNG"),
    ],
)
def test_what_cannot_be_decoded_gets_a_reason(data: bytes, formats: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UndecodableError, match=reason):
        decode_image(data, formats)


def test_a_float_image_is_refused_and_the_pixel_limit_is_ours() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.float32)).save(buffer, "TIFF")
    with pytest.raises(UndecodableError, match="mode F have no agreed range"):
        decode_image(buffer.getvalue())
    assert Image.MAX_IMAGE_PIXELS is None and DEFAULT_LIMITS.max_image_pixels == 1 << 27
