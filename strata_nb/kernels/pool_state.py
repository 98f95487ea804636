"""What a card remembers of the experts that the CPU computes: words of its own memory.

They come back with each window. All are int64 and only grow. Names are places in bytes from their
beginning.

    POSTS       number of the latest post in the mailbox
    POSTED_AT   when it was posted, in nanoseconds of the card
    ALONE_NS    nanoseconds from each post until the card had done its own part of the layer, in all
    WAITED_NS   nanoseconds that it then waited for answers, in all
    CHOICES     how many choices went to the CPU
    BESIDE      how many missed choices of the same layers the card read over the link meanwhile
    ERROR       0; LATE where an answer did not come in time; ABORTED where the mailbox said so.
                From then on the card posts nothing and waits for nothing
"""

from __future__ import annotations

POSTS, POSTED_AT, ALONE_NS, WAITED_NS, CHOICES, BESIDE, ERROR = range(0, 56, 8)
WORDS = 7

LATE, ABORTED = 1, 2

DEADLINE_NS = 2_000_000_000  # that a card waits for an answer
