"""Election of a writer: in the bucket, in etcd, or in Kubernetes."""
