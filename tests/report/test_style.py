"""The scale of shares can be read in grey and by any eye."""

import itertools

from matplotlib.colors import LinearSegmentedColormap, to_hex

from wide.report.drawing import CYCLE, DARK, LIGHT


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_scale_falls_evenly_in_lightness():
    scale = LinearSegmentedColormap.from_list("shares", [LIGHT, DARK])
    values = [luminance(to_hex(scale(step / 8))) ** (1 / 2.2) for step in range(9)]
    falls = [before - after for before, after in itertools.pairwise(values)]
    assert min(falls) > 0.05


def lightness(colour):
    """Return L* of CIE 1976."""
    value = luminance(colour)
    return 116 * value ** (1 / 3) - 16 if value > 0.008856 else 903.3 * value


def test_lines_beside_each_other_differ_in_lightness():
    values = [lightness(colour) for colour in CYCLE]
    assert min(abs(one - other) for one, other in itertools.pairwise(values)) > 6
