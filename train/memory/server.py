"""The process of a :class:`train.memory.predict.Predictor`: loads the libraries, then answers job after job."""

import gc
import os
import pickle
import sys
import traceback

from train.memory.predict import GUESS, CannotStandInError
from train.records import UserError, one_line


def main() -> None:
    """Reads jobs from standard input and writes their predictions, or errors, to standard output."""
    answers = os.fdopen(os.dup(1), "wb")  # prints of libraries, also of C ones, must not mix with answers
    os.dup2(2, 1)
    gc.disable()
    from train.memory.trial import fake_tensors, predict

    with fake_tensors():  # loads the libraries before the first job arrives
        pass
    gc.freeze()  # no collection needs to visit their million objects
    gc.enable()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # the interpreter's shutdown must not call the functions that were put into C++ tables
        try:
            answer = predict(job)
        except UserError as error:
            answer = error if isinstance(error, CannotStandInError) else UserError(str(error))
        except Exception as error:  # a model may do anything with tensors that have no data
            traceback.print_exc()
            reason = f"{type(error).__name__}: {one_line(error, 300)}"
            reason += f" ({GUESS})" if job.is_guess else ""
            answer = UserError(f"this model or setting cannot be predicted: {reason}. A run tries it for real.")
        pickle.dump(answer, answers)
        answers.flush()
        gc.collect()
        gc.freeze()
