"""Lengths of 10,000 documents in tokens, as real texts have them. As a program: prints them, a line each.

QUANTILES are those of 10,000 files of a Debian 12, 3,900 of its documentation of at most 2^17 tokens, the others manual
pages, in words and punctuation marks. Between two quantiles the logarithm of the length is drawn evenly.
"""

import math
import random

COUNT = 10_000
# fmt: off
QUANTILES = [
    1, 82, 137, 196, 234, 276, 313, 348, 386, 429, 477, 524, 575, 623, 670, 711, 745, 784, 826, 869, 913, 965,
    1023, 1084, 1147, 1217, 1290, 1381, 1486, 1634, 1808, 2032, 2340, 2741, 3214, 4015, 5127, 7047, 11328,
    26321, 129097,
]
# fmt: on


def lengths():
    choice = random.Random(0)

    def draw():
        low, share = divmod(choice.random() * (len(QUANTILES) - 1), 1)
        return math.exp((1 - share) * math.log(QUANTILES[int(low)]) + share * math.log(QUANTILES[int(low) + 1]))

    return [round(draw()) for _ in range(COUNT)]


if __name__ == "__main__":
    print(*lengths(), sep="\n")
