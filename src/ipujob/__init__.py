"""IPUJob: a Kubernetes object that runs programs written for PopTorch, and the same file on a laptop."""
