#!/bin/bash
# The first process of a container, in namespaces that the caller has made: mounts, then a program of the image as its user.
# Folders that the program may write to are empty; everything is gone with the namespaces.
# usage: pod.sh ROOT USER GROUP WORK HOSTS DATA FOLDERS PROGRAM [ARGUMENT]...   HOSTNAME and the container's variables are those
#        of the call; HOSTS becomes /etc/hosts, DATA becomes /data; FOLDERS are separated by colons
set -eu
root=$1 user=$2 group=$3 work=$4 hosts=$5 data=$6 folders=$7
shift 7
hostname "$HOSTNAME"
mount --bind "$hosts" "$root/etc/hosts"
mount --bind "$data" "$root/data"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
for folder in ${folders//:/ }; do
  mount -t tmpfs -o "uid=$user,gid=$group,mode=755" tmpfs "$root$folder"
done
ip link set lo up
exec unshare --root="$root" --wd="$work" --setgid="$group" --setuid="$user" -- "$@"
