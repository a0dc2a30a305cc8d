// Requests to this server, with the key that the person gave, kept for this tab only.

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const keyHeaders = () => {
  const key = sessionStorage.getItem("firstlight-key");
  return key ? { authorization: `Bearer ${key}` } : {};
};

export async function fetched(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { ...keyHeaders(), ...options.headers }, cache: "no-store" });
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Refused(answer.status, body?.error?.message ?? `status ${answer.status}`);
  }
  return answer;
}

export const fetchedJson = async (path) => (await fetched(path)).json();
