//! Confinement of the daemon after setup: no core files, no new programs, no access to other processes or to files
//! other than its own. This limits the damage if an attacker takes over the process.

use std::fs;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope, path_beneath_rules,
};
use nix::libc;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use crate::files;
use crate::isolation::seccomp::{self, Rules, add};
use crate::policy::settings::{ListenAt, Settings};

/// Paths of the system's configuration, root certificates and random numbers.
const SYSTEM_PATHS: [&str; 7] = ["/etc", "/usr", "/proc", "/sys/fs/cgroup", "/dev/null", "/dev/urandom", "/dev/random"];
/// Devices that the process may write to.
const WRITABLE_DEVICES: [&str; 1] = ["/dev/null"];

/// Confines the process permanently. It must be called before other threads start. Protections that the kernel does
/// not support are left out, and a log line lists those in force.
pub(super) fn confine(settings: &Settings, config: Option<&Path>) {
    let calls = filter_system_calls().map_or_else(|error| format!("off ({error})"), |()| "on".to_owned());
    let paths = restrict_paths(settings, config).unwrap_or_else(|error| format!("off ({error})"));
    tracing::info!(seccomp = calls, landlock = paths, "confined");
}

/// Denies system calls that a proxy does not need and an attacker could use.
fn filter_system_calls() -> Result<(), seccompiler::Error> {
    let mut rules = Rules::new();
    for call in DENIED_CALLS {
        add(&mut rules, call, Vec::new());
    }
    let namespaces = NAMESPACE_FLAGS.iter().map(|flag| {
        let flag = u64::from(flag.unsigned_abs());
        let has = SeccompCmpOp::MaskedEq(flag);
        Ok(SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Qword, has, flag)?])?)
    });
    add(&mut rules, libc::SYS_clone, namespaces.collect::<Result<_, seccompiler::Error>>()?);
    seccomp::deny(libc::EPERM, rules)?;
    // The flags of clone3 are in memory, which a filter cannot read. On ENOSYS, libraries fall back to clone.
    let mut clone3_rules = Rules::new();
    add(&mut clone3_rules, libc::SYS_clone3, Vec::new());
    seccomp::deny(libc::ENOSYS, clone3_rules)
}

const NAMESPACE_FLAGS: [i32; 7] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
];

/// System calls for new programs, other processes, namespaces, mounts, kernel internals and identities.
const DENIED_CALLS: [i64; 46] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_capset,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// Limits writing to the daemon's own files, and reading to those, its configuration and the system's. Files that a
/// later configuration names must be in directories that the first one named. Returns the status for the log.
fn restrict_paths(settings: &Settings, config: Option<&Path>) -> Result<String, Box<dyn std::error::Error>> {
    for file in written_files(settings) {
        if let Some(folder) = parent_dir(file) {
            files::private_dir(&folder)?;
        }
    }
    files::private_dir(&settings.state_dir)?;
    let listeners = settings.proxy.listeners.iter().map(|listener| &listener.at);
    let sockets = listeners.chain(&settings.admin.listen).chain(&settings.metrics.listen).filter_map(|at| match at {
        ListenAt::Unix(path) => Some(path),
        ListenAt::Tcp(_) => None,
    });
    let own: Vec<_> = written_files(settings).chain(sockets).filter_map(|file| parent_dir(file)).collect();
    let own: Vec<_> = own.into_iter().chain([settings.state_dir.clone()]).collect();
    if own.iter().any(|folder| folder == Path::new("/")) {
        return Ok("off (the daemon writes files directly in /)".to_owned());
    }
    let status = apply_landlock(&own, &readable_paths(settings, config))?;
    Ok(match status {
        RulesetStatus::FullyEnforced => "on",
        RulesetStatus::PartiallyEnforced => "partially on",
        RulesetStatus::NotEnforced => "off (not supported by this kernel)",
    }
    .to_owned())
}

/// Returns the files that the daemon creates and writes.
fn written_files(settings: &Settings) -> impl Iterator<Item = &PathBuf> {
    let files = [&settings.vault.path, &settings.interception.ca_cert];
    files
        .into_iter()
        .chain(&settings.interception.ca_key)
        .chain(settings.vault.key.file())
        .chain(settings.ledger.file())
        .chain(&settings.audit.path)
}

fn apply_landlock(own: &[PathBuf], read: &[PathBuf]) -> Result<RulesetStatus, RulesetError> {
    // Older kernels ignore the access rights that they do not support.
    const NEWEST_ABI: ABI = ABI::V6;
    let read_only = AccessFs::ReadFile | AccessFs::ReadDir;
    let without_programs = AccessFs::from_all(NEWEST_ABI) & !AccessFs::Execute;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST_ABI))?
        .scope(Scope::Signal)?
        .create()?
        .add_rules(path_beneath_rules(SYSTEM_PATHS, read_only))?
        .add_rules(path_beneath_rules(WRITABLE_DEVICES, AccessFs::WriteFile | AccessFs::ReadFile))?
        .add_rules(path_beneath_rules(read, read_only))?
        .add_rules(path_beneath_rules(own, without_programs))?
        .restrict_self()?;
    Ok(status.ruleset)
}

/// Returns the directories of the files that the configuration names, and of the targets of links among them. A file in
/// the root directory is returned itself.
fn readable_paths(settings: &Settings, config: Option<&Path>) -> Vec<PathBuf> {
    let tls = settings.proxy.tls.iter();
    let tls = tls.flat_map(|tls| [&tls.cert, &tls.key].into_iter().chain(&tls.client_ca).chain(&tls.crl));
    let named = settings.upstream.extra_roots.iter().chain(&settings.upstream.crls).chain(tls).cloned();
    let roots = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let base = config.and_then(parent_dir).unwrap_or_default();
    let text = config.and_then(|config| fs::read_to_string(config).ok()).unwrap_or_default();
    let secrets = secret_files(&text).into_iter().map(|file| base.join(file));
    // On many systems, resolv.conf is a link to a file that a service keeps up to date.
    let all = named.chain(secrets).chain(config.map(Path::to_owned)).chain([PathBuf::from(RESOLV_CONF)]);
    let places = all.flat_map(|file| [fs::canonicalize(&file).ok(), Some(file)]).flatten().filter_map(|file| {
        let folder = parent_dir(&file)?;
        Some(if folder == Path::new("/") { file } else { folder })
    });
    places.chain(roots).collect()
}

const RESOLV_CONF: &str = "/etc/resolv.conf";

fn parent_dir(file: &Path) -> Option<PathBuf> {
    let parent = file.parent()?;
    Some(if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_owned() })
}

/// Returns the files that a configuration names as sources of secrets.
fn secret_files(text: &str) -> Vec<PathBuf> {
    fn walk(value: &toml::Value, found: &mut Vec<PathBuf>) {
        match value {
            toml::Value::String(text) => found.extend(text.strip_prefix("file:").map(PathBuf::from)),
            toml::Value::Array(items) => items.iter().for_each(|item| walk(item, found)),
            toml::Value::Table(table) => table.values().for_each(|value| walk(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    if let Ok(table) = text.parse::<toml::Table>() {
        walk(&toml::Value::Table(table), &mut found);
    }
    found
}
