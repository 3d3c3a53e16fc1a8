//! A network card in another network namespace whose other end is a file in this process: the two system calls for it
//! have no safe wrapper. Frames are read and written without any header.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// `TUNSETIFF` of linux/if_tun.h.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;

/// `struct ifreq` as TUNSETIFF reads it: a name, flags, and padding up to its size.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}

/// Runs `work` in the namespace of that name, on a separate thread, because a namespace belongs to a thread.
pub fn within<T: Send + 'static>(
    namespace: &str,
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> std::thread::JoinHandle<io::Result<T>> {
    let path = Path::new("/run/netns").join(namespace);
    std::thread::spawn(move || {
        let namespace = File::open(path)?;
        // SAFETY: setns takes no pointer; the descriptor is open.
        if unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
        act()
    })
}

/// Makes the card `eth0` in the namespace of that name.
pub fn open(namespace: &str) -> io::Result<File> {
    let made = within(namespace, || {
        let tap = File::options().read(true).write(true).open("/dev/net/tun")?;
        let mut request = Request { name: [0; 16], flags: IFF_TAP | IFF_NO_PI, rest: [0; 22] };
        request.name[..4].copy_from_slice(b"eth0");
        // SAFETY: the descriptor is open, and `request` has the layout and size of the struct ifreq that this call
        // reads and writes; it outlives the call.
        if unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETIFF as _, &raw mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(tap)
    });
    made.join().unwrap_or_else(|_| Err(io::Error::other("the thread that makes a card panicked")))
}
