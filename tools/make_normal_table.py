"""Write megatron_lite/tensor/normal_table.py: the polynomials of the inverse normal.

Random words become normal numbers by a table of polynomials that is part of the definition of the initial weights, so
it is made once and stored; this says where it came from, and a test makes part of it again. For each octave p in
[2^e, 2^(e+1)) * 2^-33 of the tail probability, e = 0..31, the function -Phi^-1(p) / (1/2 - p) of s = p / 2^(e-33) -
3/2 is interpolated in the 14 Chebyshev points of [-1/2, 1/2], in 60 digits, and the coefficients of s^0..s^13 are
rounded to doubles. The relative error of the result is below 1e-12.

Usage: python tools/make_normal_table.py > megatron_lite/tensor/normal_table.py   (mpmath comes with torch)
"""

from __future__ import annotations

import struct
import sys

import mpmath
from mpmath import mpf

DEGREE = 13
OCTAVES = 32

HEADER = '''"""Polynomials of the inverse normal, as doubles in big-endian hexadecimal, by tools/make_normal_table.py.

Row e has the coefficients of s^0 .. s^13 for octave e; random.py says how they are used.
"""

COEFFICIENTS = """
'''


def tail_quantile(p: mpf) -> mpf:
    """z > 0 with P(normal > z) = p, for p in (0, 1/2)."""
    start = mpmath.sqrt(-2 * mpmath.log(p)) * mpf("0.9") if p < 0.2 else mpf("0.7")
    return mpmath.findroot(lambda z: mpmath.log(mpmath.erfc(z / mpmath.sqrt(2)) / 2) - mpmath.log(p), start)


def octave(e: int) -> list[float]:
    """Coefficients of octave e."""
    with mpmath.workdps(60):
        n = DEGREE + 1
        nodes = [mpmath.cos(mpmath.pi * (2 * k + 1) / (2 * n)) / 2 for k in range(n)]
        values = []
        for s in nodes:
            p = (s + mpf(3) / 2) * mpf(2) ** (e - 33)
            values.append(tail_quantile(p) / (mpf(1) / 2 - p))
        powers = mpmath.matrix(n, n)
        for row, s in enumerate(nodes):
            for k in range(n):
                powers[row, k] = s**k
        return [float(c) for c in mpmath.lu_solve(powers, mpmath.matrix(values))]


def main() -> None:
    """Print the module."""
    sys.stdout.write(HEADER)
    for e in range(OCTAVES):
        words = [struct.pack(">d", c).hex() for c in octave(e)]
        for k in range(0, len(words), 7):
            sys.stdout.write(" ".join(words[k : k + 7]) + "\n")
    sys.stdout.write('"""\n')


if __name__ == "__main__":
    main()
