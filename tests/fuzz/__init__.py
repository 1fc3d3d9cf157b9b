"""Random models, trained in all layouts and in plain PyTorch: the same bits, or a program that shows the difference.

python -m tests.fuzz --seconds 60 --seed 0
"""
