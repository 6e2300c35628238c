"""One file per stage: the checked configuration to the job that the stage needs."""
