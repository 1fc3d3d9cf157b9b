"""IPUJob: a Kubernetes object that runs programs written for PopTorch, in a cluster or on one machine."""
