from train.records import *  # noqa: F403
