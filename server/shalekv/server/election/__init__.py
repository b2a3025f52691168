"""Election of the writer: in the bucket, in etcd, or in Kubernetes."""
