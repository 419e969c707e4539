"""Low-rank rewritings of full fine-tunes: base + B A per linear layer, served as LoRA rows in the base's batch.

Modules:
    plan.py      choice of the tensors that become factors
    moments.py   input moments of the linear layers on text
    factors.py   truncated factors of one matrix
    effects.py   effect of each matrix on the predictions
    ranks.py     rank of each matrix
    study.py     factors and hidden states of a fine-tune, from one pass
    trial.py     the rewriting at any rank, as a running model
    score.py     similarity to the fine-tune
    curve.py     scores at any ranks
    folder.py    the rewriting as a PEFT folder
    windows.py   the text as token ids
    make.py      the whole process, into the zoo
"""
