"""Tests what each kind of image becomes, value by value, and where this differs from transformers' `load_image`."""

import functools
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataplane.media.images import decode_image
from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import MediaLimits
from tests.dataplane.shards import encode, noise

RGB = noise(1, 24, 32)
SMOOTH = np.stack([np.add.outer(np.arange(24) * 5, np.arange(32) * 3) + 20 * band for band in range(3)], -1)
SMOOTH = SMOOTH.astype(np.uint8)
WIDE = np.random.default_rng(3).integers(0, 1 << 16, (24, 32, 4)).astype(np.uint16)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(samples: np.ndarray, color_type: int, depth: int = 16, extra: bytes = b"") -> bytes:
    """Return a PNG with these [height, width, channels] samples, unfiltered. `extra` are chunks before the data."""
    rows = samples.astype(">u2" if depth == 16 else np.uint8).reshape(len(samples), -1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], depth, color_type, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


def palette(transparent: bool) -> tuple[bytes, np.ndarray]:
    image = Image.fromarray(RGB).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    data = encode(image, "PNG", **({"transparency": bytes(range(0, 256, 16))} if transparent else {}))
    return data, np.asarray(image.convert("RGB"))


def cmyk_without_adobe_marker() -> bytes:
    """Return a CMYK JPEG whose samples are not inverted. Pillow treats every CMYK JPEG as inverted."""
    data = encode(Image.fromarray(255 - np.asarray(Image.fromarray(SMOOTH).convert("CMYK")), "CMYK"), "JPEG")
    at = data.find(b"\xff\xee")
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :] if at >= 0 else data


def animation(kind: str) -> bytes:
    frames = [Image.fromarray(noise(at, 24, 32)) for at in (1, 2, 3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    return encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)


GREY = Image.fromarray(RGB).convert("L")
ONE_BIT = GREY.convert("1")
RGBA = np.dstack([RGB, noise(2, 24, 32)[:, :, 0]])
EXACT = {
    "PNG": (encode(RGB), RGB),
    "PNG, RGB of 16 bits: the high byte": (png(WIDE[:, :, :3], 2), WIDE[:, :, :3] >> 8),
    "PNG, RGBA of 16 bits": (png(WIDE, 6), WIDE[:, :, :3] >> 8),
    "PNG, grey and alpha of 16 bits": (png(WIDE[:, :, :2], 4), grey(WIDE[:, :, 0] >> 8)),
    "PNG, RGBA: alpha is dropped, not blended": (encode(Image.fromarray(RGBA)), RGB),
    "PNG, grey and alpha": (encode(GREY.convert("LA")), grey(np.asarray(GREY))),
    "PNG, grey": (encode(GREY), grey(np.asarray(GREY))),
    "PNG, 1 bit": (encode(ONE_BIT), grey(np.asarray(ONE_BIT).astype(np.uint8) * 255)),
    "PNG, palette": palette(False),
    "PNG, palette with transparency: its colours": palette(True),
    "WebP, lossless": (encode(RGB, "WEBP", lossless=True), RGB),
    "WebP, lossless with alpha": (encode(Image.fromarray(RGBA), "WEBP", lossless=True, exact=True), RGB),
    "WebP, animated: the first frame": (animation("WEBP"), RGB),
    "PNG, animated: the first frame": (animation("PNG"), RGB),
    "TIFF, several pages: the first": (animation("TIFF"), RGB),
    "BMP": (encode(RGB, "BMP"), RGB),
    "BMP, palette": (
        encode(Image.fromarray(RGB).convert("P"), "BMP"),
        np.asarray(Image.fromarray(RGB).convert("P").convert("RGB")),
    ),
    "TIFF": (encode(RGB, "TIFF"), RGB),
    "TIFF, LZW": (encode(RGB, "TIFF", compression="tiff_lzw"), RGB),
    "TIFF, CMYK": (
        encode(Image.fromarray(RGB).convert("CMYK"), "TIFF"),
        np.asarray(Image.fromarray(RGB).convert("CMYK").convert("RGB")),
    ),
    "PPM": (encode(RGB, "PPM"), RGB),
}
"""By name the bytes of an image, and its values: [height, width, 3]."""
LOSSY = {
    "JPEG": (encode(SMOOTH, "JPEG", quality=95, subsampling=0), 4),
    "JPEG, progressive": (encode(SMOOTH, "JPEG", quality=95, subsampling=0, progressive=True), 4),
    "JPEG, CMYK as Adobe inverts it": (encode(Image.fromarray(SMOOTH).convert("CMYK"), "JPEG", quality=95), 12),
    "WebP, lossy": (encode(SMOOTH, "WEBP", quality=95), 12),
}
"""By name the bytes of `SMOOTH`, and the most by which a value of it may differ."""


def load_image(data: bytes, path: Path) -> np.ndarray:
    """Load an image with transformers' loader, as its pipelines and vLLM's use it."""
    from transformers.image_utils import load_image as load

    path.write_bytes(data)
    return np.asarray(load(str(path)))


@pytest.mark.parametrize("name", EXACT)
def test_an_image_becomes_these_values(name: str) -> None:
    data, expected = EXACT[name]
    found, _ = decode_image(data)
    assert found.mode == "RGB" and np.array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_image_looks_as_it_should(name: str) -> None:
    data, most = LOSSY[name]
    assert np.abs(np.asarray(decode_image(data)[0]).astype(int) - SMOOTH).max() <= most


@pytest.mark.torch
@pytest.mark.parametrize("name", [*EXACT, *LOSSY])
def test_an_image_is_what_transformers_has(name: str, tmp_path: Path) -> None:
    data, _ = (EXACT | LOSSY)[name]
    assert np.array_equal(np.asarray(decode_image(data)[0]), load_image(data, tmp_path / "image"))


@pytest.mark.torch
def test_a_cmyk_jpeg_without_adobes_mark_is_read_as_inverted_as_pillow_does(tmp_path: Path) -> None:
    data = cmyk_without_adobe_marker()
    assert b"Adobe" not in data
    assert np.array_equal(np.asarray(decode_image(data)[0]), load_image(data, tmp_path / "image"))


@pytest.mark.torch
def test_grey_of_sixteen_bits_keeps_its_high_byte_where_transformers_has_white(tmp_path: Path) -> None:
    """Test the one difference: `convert("RGB")` clips at 255, so in transformers almost everything becomes white."""
    values = WIDE[:, :, 0]
    for data in (
        png(values[:, :, None], 0),
        encode(Image.fromarray(values), "TIFF"),
        encode(Image.fromarray(values), "PPM"),
    ):
        assert np.array_equal(np.asarray(decode_image(data)[0]), grey(values >> 8))
        assert (load_image(data, tmp_path / "image") == 255).mean() > 0.95


@pytest.mark.torch
def test_every_exif_orientation_is_applied_as_with_transformers(tmp_path: Path) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
            data = encode(Image.fromarray(RGB), kind, exif=exif)
            found = decode_image(data)[0]
            assert found.size == ((32, 24) if orientation < 5 else (24, 32))
            assert np.array_equal(np.asarray(found), load_image(data, tmp_path / "image")), (orientation, kind)


def test_a_gif_gives_its_first_frame() -> None:
    first = Image.fromarray(RGB).convert("P", palette=Image.Palette.ADAPTIVE)
    others = [Image.fromarray(noise(at, 24, 32)).convert("P") for at in (5, 6)]
    data = encode(first, "GIF", save_all=True, append_images=others)
    assert np.array_equal(np.asarray(decode_image(data)[0]), np.asarray(first.convert("RGB")))


@functools.cache
def bomb() -> bytes:
    """Return bytes that become 256 MiB when they are inflated. Making them takes no such memory."""
    packer, zeros = zlib.compressobj(), bytes(1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(256)) + packer.flush()


def png_with_a_bomb(name: bytes, start: bytes) -> bytes:
    return png(np.zeros((1, 1, 3)), 2, 8, chunk(name, start + bomb()))


def gif_whose_frame_is_larger_than_its_screen(width: int, height: int) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00;"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: png_with_a_bomb(b"zTXt", b"a\0\0"), "too large"),
        (lambda: png_with_a_bomb(b"iTXt", b"a\0\1\0\0\0"), "too large"),
        (lambda: png_with_a_bomb(b"iCCP", b"a\0\0"), "too large"),
        (lambda: gif_whose_frame_is_larger_than_its_screen(60_000, 60_000), "decompression bomb: 60000x60000"),
        (
            lambda: b"BM" + struct.pack("<IIIIiiHHI", 54, 0, 54, 40, 1 << 20, 1 << 20, 1, 24, 0) + bytes(20),
            "decompression bomb",
        ),
        (lambda: b"P6 100000 100000 255\n", "decompression bomb: 100000x100000"),
    ],
)
def test_what_would_grow_out_of_bounds_is_refused_without_growing(make: Callable[[], bytes], reason: str) -> None:
    import resource

    data = make()
    Path("/proc/self/clear_refs").write_text("5")  # forget how much memory this process once had
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UndecodableError, match=reason):
        decode_image(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_the_limits_are_the_nodes() -> None:
    data = encode(RGB)
    assert decode_image(data, limits=MediaLimits(max_image_pixels=24 * 32))[1] == "PNG"
    with pytest.raises(UndecodableError, match="32x24 = 768 pixels; at most 767"):
        decode_image(data, limits=MediaLimits(max_image_pixels=767))
    with pytest.raises(ValueError, match="max_decode_seconds is 0; wanted a number above 0"):
        MediaLimits(max_decode_seconds=0)


def test_integers_of_32_bits_are_refused() -> None:
    with pytest.raises(UndecodableError, match="mode I have no agreed range"):
        decode_image(encode(Image.fromarray(np.zeros((4, 4), np.int32)), "TIFF"))
