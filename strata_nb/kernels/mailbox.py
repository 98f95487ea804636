"""The block of memory through which a card has experts computed by threads of the host.

The card posts a message: a layer, some of its experts with their shares, and the row that they
read. The threads answer with the weighted sum of what these experts make of it. The block is pinned
memory of the host that the card has mapped; both sides read the offsets here, in bytes from its
beginning.

    POSTED     int64, number of the latest post: the card writes it last
    ANSWERED   int64, number of the latest post that was answered: the threads write it last
    ABORT      int64, not 0: nobody shall wait any longer; either side sets it, once and for all
    message    LAYER    int64, number of the layer among those with experts
               COUNT    int64, how many choices, 1 .. MOST_CHOICES
               CHOICES  COUNT pairs of int64: an expert's number in the layer, ascending; its share
                        as a float32 in the low half, the high half is not looked at
               ROW      the layer's input, quantised (`quantised_rows.py`)
    answer     float32 (width,): sum over the choices, in their order, of share * down(silu(gate) *
               up), as `expert_down` of the table has it for a row that was zeros

At most one post is outstanding. Numbers begin at 0 and grow by one with each post. A message is
written before POSTED and an answer before ANSWERED, released at the scope of the system and
acquired by the reader. Words that different sides write lie in lines apart, as the host's caches
fetch them: two of 64 bytes at a time.
"""

from __future__ import annotations

from strata_nb.kernels.quantised_rows import row_bytes

LINE = 128
MOST_CHOICES = 64

POSTED = 0 * LINE
ANSWERED = 1 * LINE
ABORT = 2 * LINE
LAYER = 3 * LINE
COUNT = LAYER + 8
CHOICES = LAYER + 16
CHOICE_BYTES = 16
SHARE = 8  # of a choice


def _lines(size: int) -> int:
    return -(-size // LINE) * LINE


ROW = _lines(CHOICES + MOST_CHOICES * CHOICE_BYTES)  # the first line behind the choices


def answer_offset(width: int) -> int:
    """Return where the answer begins for rows of so many values, a multiple of 32."""
    return ROW + _lines(row_bytes(width))


def box_bytes(width: int) -> int:
    """Return the bytes of the whole block; it begins at a multiple of LINE."""
    return answer_offset(width) + _lines(4 * width)
