"""`poprun`: starts one training in several processes, on this host or on several, and watches over them.

    poprun --num-replicas 4 --num-instances 2 python3 train.py

Words become a value in `command_line.py`; `agent.py` hands it to torch.distributed.elastic, which starts the instances,
watches them and starts all again; `guard.py` sees to it that nothing is left when any of these is killed.
"""
