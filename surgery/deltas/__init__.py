"""Low-rank rewritings of full fine-tunes: base + B A per linear layer, served as LoRA rows in the base's batch.

plan.py      which tensors moved, and how each is carried         moments.py   what goes into the linear layers on real
                                                                               text
factors.py   the truncated factors of one matrix                  ranks.py     how many of them each matrix gets
trial.py     the rewriting at any rank, as a running model         score.py     how near it is to the fine-tune
folder.py    the rewriting as a PEFT folder                        make.py      all of it, into the zoo
"""
