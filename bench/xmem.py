"""Predicted peaks compared with measured ones: training runs of others on three GPUs, estimated without any GPU.

    python bench/xmem.py                       # all rows, some minutes on one core
    python bench/xmem.py --rows x053 x088      # these again; the other rows' predictions stay
    python bench/xmem.py --page                # only write the page again from the predictions

Writes docs/prediction.json and docs/prediction.md. The runs used transformers 4.51.3 and torchvision's models. Their
code is run in these versions if they are found first:

    pip install --no-deps --target build/xmem -r bench/data/xmem_requirements.txt
    PYTHONPATH=build/xmem python bench/xmem.py

Otherwise the installed transformers is used, and CNNs are left out if torchvision is not installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from estimators.page import line, page
from estimators.records import Prediction, Predictions
from estimators.rows import Row, load
from estimators.scores import Scored, claims, scored

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> None:
    options = parsed()
    rows = load()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prediction.json"
    predictions = Predictions.from_json(file) if file.exists() else Predictions(versions={}, found=())
    if not options.page:
        asked = [row for row in rows if not options.rows or row.id in options.rows]
        for prediction in predicted(asked):
            predictions = merged(rows, predictions, prediction)
            predictions.to_json(file)  # after each row, so that a run that is cut off keeps its results
    (folder / "prediction.md").write_text(page(rows, predictions), encoding="utf-8")
    print(f"\nwritten: {file} and prediction.md beside it\n")
    for claim in claims(scored(rows, predictions.found)):
        said = {True: "held", False: "NOT held", None: "not measured"}[claim.held]
        print(f"{said:13} {claim.text}: {claim.found}")


def predicted(asked: list[Row]) -> Iterator[Prediction]:
    """Predict each row, with a progress bar; yield the predictions."""
    from tqdm import tqdm

    quiet()
    from estimators.predicting import predict  # imports torch and transformers

    for row in tqdm(asked, unit="row", disable=None, file=sys.stderr):
        refusal = row.unknown
        if refusal is None:
            try:
                prediction = predict(row)
            except ModuleNotFoundError as error:
                refusal = f"{error.name} is not installed"
        if refusal is not None:
            prediction = Prediction(row=row.id, refusal=refusal)
            tqdm.write(f"{row.id} {row.name:46} not rebuilt: {refusal}")
        else:
            tqdm.write(line(Scored(row=row, prediction=prediction)))
        yield prediction


def merged(rows: tuple[Row, ...], known: Predictions, new: Prediction) -> Predictions:
    """Return all predictions, with `new` in place of an older prediction of its row, in the order of the rows."""
    by_row = {prediction.row: prediction for prediction in (*known.found, new)}
    versions = {name: found for name in ("torch", "transformers", "torchvision") if (found := installed(name))}
    return Predictions(versions=versions, found=tuple(by_row[row.id] for row in rows if row.id in by_row))


def installed(name: str) -> str | None:
    """Return the version of a package that would be imported; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def quiet() -> None:
    """Silence warnings of packages, for example of old ones about new ones, and keep transformers offline."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these, as x001")
    parser.add_argument("--page", action="store_true", help="predict nothing")
    parser.add_argument("--out", default=DOCS, metavar="FOLDER", help="where to write, in place of docs/")
    options = parser.parse_args()
    unknown = set(options.rows or ()) - {row.id for row in load()}
    if unknown:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}. They are called x001 to x{len(load()):03}")
    return options


if __name__ == "__main__":
    main()
