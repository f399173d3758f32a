"""A process that draws charts on request.

``python -m lightning_entrain.data.charts.worker OPTIONS`` reads one index per line from standard
input and answers each with a JSON line on standard output, followed by the bytes of the image. It
ends when its input does, so it cannot outlive the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

from lightning_entrain.data.charts.sample import ChartOptions, make_sample


def main(arguments: str) -> None:
    """Answer requests until the input ends.

    Args:
        arguments: Fields of :class:`ChartOptions` as JSON.
    """
    # Ctrl-C reaches the whole process group; the parent closes our input and that ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = ChartOptions(**json.loads(arguments))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stray prints must not mix with answers
    prepared = False
    for line in sys.stdin:
        image = b""
        try:
            if not prepared:
                from lightning_entrain.data.charts.draw import fix_style

                fix_style()
                prepared = True
            sample = make_sample(options, int(line))
            image = sample.image or b""
            answer = {"user": sample.user, "assistant": sample.assistant}
        except Exception as error:
            answer = {"error": str(error), "trace": traceback.format_exc()}
        answers.write(json.dumps({**answer, "num_bytes": len(image)}).encode() + b"\n" + image)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
