#!/bin/bash
# A Slurm cluster on this machine: nodes n1 to nN with four processors and two cards each, which are files. Root only.
# The names of the nodes are known inside the nodes alone.
# usage: cluster.sh DIR N PORT      starts it; DIR/slurm.conf is SLURM_CONF
#        cluster.sh DIR stop        ends its processes
set -eu
S=$1
if [ "$2" = stop ]; then
  pids=$(cat "$S"/pid/* 2>/dev/null || true)
  for pid in $pids; do kill "$pid" 2>/dev/null || true; done
  for _ in $(seq 50); do
    left=
    for pid in $pids; do ! kill -0 "$pid" 2>/dev/null || left=1; done
    [ -n "$left" ] || exit 0
    sleep 0.1
  done
  for pid in $pids; do kill -9 "$pid" 2>/dev/null || true; done
  exit 0
fi
N=$2 port=$3 host=$(hostname -s)
mkdir -p "$S"/{state,log,pid}
cp /etc/hosts "$S/hosts"
cat > "$S/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
# A requeued job begins soon after this time; the default is 120 seconds.
AuthInfo=cred_expire=5
CredType=cred/none
# The port of a run follows from its job, and clusters of several tests run beside each other.
FirstJobId=$port
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool.%n
SlurmctldPidFile=$S/pid/slurmctld
SlurmdPidFile=$S/pid/slurmd.%n
SlurmctldLogFile=$S/log/slurmctld.log
SlurmdLogFile=$S/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=5
KillWait=10
InactiveLimit=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
CONF
for i in $(seq "$N"); do
  mkdir -p "$S/spool.n$i"
  echo "127.0.0.1 n$i" >> "$S/hosts"
  echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=4 RealMemory=2000 Gres=gpu:2"
done >> "$S/slurm.conf"
echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >> "$S/slurm.conf"
printf "NodeName=n[1-$N] Name=gpu File=%s\n" /dev/null /dev/zero > "$S/gres.conf"
export SLURM_CONF=$S/slurm.conf
/usr/sbin/slurmctld -i
for i in $(seq "$N"); do
  unshare --mount sh -c "mount --bind '$S/hosts' /etc/hosts && exec /usr/sbin/slurmd -N n$i -b"
done
for _ in $(seq 200); do
  [ "$(sinfo -h -o %T%D 2>/dev/null)" != "idle$N" ] || exit 0
  sleep 0.1
done
sinfo -N -l
tail "$S"/log/*
exit 1
