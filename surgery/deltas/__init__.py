"""Low-rank rewritings of full fine-tunes: base + B A per linear layer, served as LoRA rows in the base's batch.

plan.py      choose which tensors become factors                  moments.py   input moments of the linear layers on
                                                                               text
factors.py   truncated factors of one matrix                      ranks.py     rank of each matrix
trial.py     the rewriting at any rank, as a running model        score.py     similarity to the fine-tune
folder.py    the rewriting as a PEFT folder                       make.py      the whole process, into the zoo
"""
