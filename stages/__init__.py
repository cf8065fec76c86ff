"""One thin script per stage: inputs, state, training, outputs. Run by DVC as `python -m stages.<name>`."""

import sys

if sys.argv[0] == "-m":  # being started as a script: a mistake in params.yaml shows now, before torch is imported
    from pipeline.params import load_params
    from pipeline.supervise import exit_on_error

    with exit_on_error("params"):
        load_params()
