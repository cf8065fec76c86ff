"""One thin script per stage: inputs, state, training, outputs. Run by DVC as `python -m stages.<name>`."""

import sys

if sys.argv[0] == "-m":  # being started as a script: what it starts from, and a mistake in params.yaml, before torch is imported
    from pipeline.lineage import ran_code  # noqa: F401  # looks at the files of the code
    from pipeline.params import load_params
    from pipeline.supervise import exit_on_error

    with exit_on_error("params"):
        load_params()
